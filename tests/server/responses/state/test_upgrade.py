"""Servers of several versions on one database: what one before wrote, what one after changed, one that dies at it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support import warm
from tests.support.responses import earlier, upgrading
from tests.support.responses.postgres import ALSO_POSTGRES
from tests.support.responses.stores import opened
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.state import tables
from vllm_gptoss.server.responses.state.database import connect
from vllm_gptoss.server.responses.state.store import Store
from vllm_gptoss.server.responses.state.stored import Stored, StoreError
from vllm_gptoss.server.responses.state.upgrade import STEPS, VERSION

pytestmark = ALSO_POSTGRES


@pytest.fixture
def options(database: None, tmp_path: Path) -> ResponsesOptions:
    return ResponsesOptions(store=os.environ.get("GPTOSS_TEST_STORE") or str(tmp_path / "store.sqlite"))


@contextmanager
def connection_to(options: ResponsesOptions) -> Iterator[sa.Connection]:
    database = connect(sa.make_url(options.url or ""))
    with database.begin() as connection:
        yield connection
    database.dispose()


async def later(options: ResponsesOptions, kind: str) -> int:
    """The exit status of a server of the next release."""
    command = ["-m", "tests.support.responses.upgrading", options.url or "", kind]
    return (await asyncio.to_thread(warm.run, command)).returncode


def runs(options: ResponsesOptions) -> int:
    with connection_to(options) as db:
        return len(db.execute(sa.select(upgrading.runs)).all())


def answer(name: str) -> Stored:
    return Stored(name, "alice", {"id": name, "status": "completed", "output": []})


async def test_what_an_earlier_version_stored_is_read(options: ResponsesOptions) -> None:
    with connection_to(options) as db:
        earlier.fill(db, time.time())
    async with opened(options.store) as store:
        chain = await store.chain("alice", earlier.SECOND)
        assert [stored.id for stored in chain or ()] == [earlier.FIRST, earlier.SECOND]
        assert await store.chain("bob", earlier.SECOND) is None
        mine = await store.get("alice", "mine")
        assert mine is not None
        assert [item["id"] for item in mine.input] == ["in_mine"]
        assert await store.background.last(mine.key) == (0, "{}")
        assert "msg_mine" in await store.find_items("alice", ["msg_mine"])
        assert (await store.conversations.get("alice", earlier.CONVERSATION) or (0, {}))[1] == {"made": "earlier"}
        assert [item["id"] for item, _ in await store.conversations.items(earlier.CONVERSATION)] == ["msg_c"]
        assert await store.setting("secret", "another") == "kept"
        assert await store.setting(VERSION) == str(STEPS[-1].version)
        await store.save(answer("fresh"))
        assert await store.delete("alice", earlier.FIRST)


async def test_servers_that_upgrade_at_once_do_it_once(options: ResponsesOptions) -> None:
    with connection_to(options) as db:
        earlier.fill(db, time.time())
    assert await asyncio.gather(*(later(options, "adds") for _ in range(3))) == [0, 0, 0]
    assert runs(options) == 1
    async with opened(options.store) as store:
        assert await store.get("alice", "mine")


async def test_an_upgrade_that_is_killed_leaves_nothing(options: ResponsesOptions) -> None:
    with connection_to(options) as db:
        earlier.fill(db, time.time())
    assert await later(options, "dies") == -signal.SIGKILL
    with connection_to(options) as db:
        there = set(sa.inspect(db).get_table_names())
        columns = {x["name"] for x in sa.inspect(db).get_columns("gptoss_responses")}
    assert not there & {upgrading.runs.name, tables.containers.name, tables.input_items.name}
    assert upgrading.COLUMN not in columns
    assert await later(options, "adds") == 0
    assert runs(options) == 1


async def test_a_server_works_on_while_a_later_one_upgrades(
    options: ResponsesOptions, caplog: pytest.LogCaptureFixture
) -> None:
    """Unknown columns have defaults; after a restart, it logs that the schema is newer."""
    async with opened(options.store) as store:
        upgrade, written = asyncio.create_task(later(options, "adds")), 0
        while not upgrade.done() or written < 10:
            name = f"during_{written}"
            await store.save(answer(name))
            assert await store.get("alice", name)
            written += 1
        assert upgrade.result() == 0
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        async with opened(options.store) as store:
            await store.save(answer("after"))
            assert await store.get("alice", "during_0")
    assert [r.getMessage() for r in caplog.records if "schema" in r.getMessage()] == [
        f"Response store: the database has schema {upgrading.NEXT}, of a newer version; this server knows schema "
        f"{upgrading.NEXT - 1} and works with it"
    ]
    with connection_to(options) as db:
        colours = db.scalars(sa.text("select colour from gptoss_responses"))
        assert set(colours) == {"none"}


async def test_a_schema_that_it_cannot_work_with_is_refused_with_advice(options: ResponsesOptions) -> None:
    async with opened(options.store) as store:
        await store.save(answer("kept"))
    assert await later(options, "breaks") == 0
    with pytest.raises(StoreError, match=r"schema \d+, which servers of schema \d+.*cannot work with.*Install"):
        await Store(options).open()


async def test_a_database_that_is_up_to_date_is_not_changed(options: ResponsesOptions) -> None:
    """So a server's role needs no right to create tables, and a start waits for no lock."""
    async with opened(options.store):
        pass
    with connection_to(options) as db:
        if db.dialect.name == "postgresql":
            lock = sa.func.pg_advisory_xact_lock(sa.literal(0x6770746F7373, sa.BigInteger))
            db.execute(sa.select(lock))
        else:
            db.exec_driver_sql("BEGIN IMMEDIATE")
        async with asyncio.timeout(20), opened(options.store):
            pass
