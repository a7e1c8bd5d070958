"""Transactions in threads: keys take turns, and a caller that is cancelled leaves neither a lock nor half a write."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from prometheus_client import REGISTRY

from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.state import database as databases
from vllm_gptoss.server.responses.state.database import Database
from vllm_gptoss.server.responses.state.store import Store
from vllm_gptoss.server.responses.state.stored import Stored, StoreError
from vllm_gptoss.settings import SettingsError
from vllm_gptoss.tools.protocol import CALLER

REPLACE = """
BEGIN IMMEDIATE;
DELETE FROM gptoss_input_uses;
DELETE FROM gptoss_input_items;
INSERT INTO gptoss_input_items (hash, name, item, bytes, tenant) VALUES ('x', 'msg_9', '{"content": "bob"}', 20, 'bob');
COMMIT;
"""
"""The expiry of all responses, and an item of another key, as another server on the file writes them."""


async def test_keys_take_turns_and_every_write_of_a_cancelled_caller_is_carried_out(tmp_path: Path) -> None:
    database = Database(sa.make_url(f"sqlite:///{tmp_path / 'store.sqlite'}"))
    await database.run(lambda db: db.exec_driver_sql("CREATE TABLE written (name TEXT)"))
    holds, entered = threading.Event(), threading.Event()

    def block(db: sa.Connection) -> None:
        db.exec_driver_sql("INSERT INTO written VALUES ('first')")
        entered.set()
        assert holds.wait(30)

    def write(name: str) -> asyncio.Task[object]:
        CALLER.set(name.partition(" ")[0])
        return asyncio.create_task(
            database.run(lambda db: db.exec_driver_sql(f"INSERT INTO written VALUES ('{name}')"))
        )

    tasks = [asyncio.create_task(database.run(block))]
    await asyncio.to_thread(entered.wait, 30)
    tasks += [write(name) for name in ("alice 1", "alice 2", "alice 3", "bob 1", "bob 2")]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    assert all(
        isinstance(ended, asyncio.CancelledError) for ended in await asyncio.gather(*tasks, return_exceptions=True)
    )
    holds.set()
    names = await database.run(lambda db: list(db.exec_driver_sql("SELECT name FROM written").scalars()))
    await database.aclose()
    assert names == ["first", "alice 1", "bob 1", "alice 2", "bob 2", "alice 3"]
    with closing(sqlite3.connect(tmp_path / "store.sqlite", timeout=0)) as other:
        other.execute("BEGIN IMMEDIATE")


async def test_work_that_fails_writes_nothing(tmp_path: Path) -> None:
    database = Database(sa.make_url(f"sqlite:///{tmp_path / 'store.sqlite'}"))
    await database.run(lambda db: db.exec_driver_sql("CREATE TABLE written (name TEXT)"))

    def fail(db: sa.Connection) -> None:
        db.exec_driver_sql("INSERT INTO written VALUES ('lost')")
        raise KeyError("of the work")

    with pytest.raises(KeyError, match="of the work"):
        await database.run(fail)
    assert await database.run(lambda db: db.exec_driver_sql("SELECT * FROM written").all()) == []
    await database.aclose()


async def test_a_failed_write_is_counted_though_its_caller_was_cancelled(tmp_path: Path) -> None:
    database = Database(sa.make_url(f"sqlite:///{tmp_path / 'store.sqlite'}"))
    holds, entered = threading.Event(), threading.Event()

    def fail(db: sa.Connection) -> None:
        entered.set()
        assert holds.wait(30)
        db.exec_driver_sql("INSERT INTO missing VALUES (1)")

    before = REGISTRY.get_sample_value("gptoss_store_errors_total") or 0.0
    task = asyncio.create_task(database.run(fail))
    await asyncio.to_thread(entered.wait, 30)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    holds.set()
    await database.aclose()
    assert REGISTRY.get_sample_value("gptoss_store_errors_total") == before + 1


async def test_a_write_that_conflicts_is_repeated_though_its_caller_was_cancelled(tmp_path: Path) -> None:
    """Another server inserts the same input item meanwhile: the first attempt fails."""
    database = Database(sa.make_url(f"sqlite:///{tmp_path / 'store.sqlite'}"))
    await database.run(lambda db: db.exec_driver_sql("CREATE TABLE written (name TEXT PRIMARY KEY)"))
    holds, entered, names = threading.Event(), threading.Event(), iter(["one", "one", "two", "three"])

    def write(db: sa.Connection) -> None:
        entered.set()
        assert holds.wait(30)
        for _ in range(2):
            db.exec_driver_sql(f"INSERT INTO written VALUES ('{next(names)}')")

    task = asyncio.create_task(database.run(write))
    await asyncio.to_thread(entered.wait, 30)
    task.cancel()
    await asyncio.wait([task])
    holds.set()
    found = await database.run(lambda db: list(db.exec_driver_sql("SELECT name FROM written ORDER BY name").scalars()))
    await database.aclose()
    assert found == ["three", "two"]


async def test_a_write_that_fails_after_its_caller_left_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(sa.make_url(f"sqlite:///{tmp_path / 'store.sqlite'}"))
    task = asyncio.create_task(database.run(lambda db: db.exec_driver_sql("INSERT INTO missing VALUES (1)")))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await database.aclose()
    assert "a client that has disconnected failed: The response store failed" in caplog.text


@pytest.mark.parametrize(
    ("of_alice", "of_bob", "refused"),
    [
        (3, 1, None),
        (4, 0, (429, "3 of this API key's transactions wait for the response store (GPTOSS_RESPONSES_KEY_WAITING).")),
        (3, 2, (503, "5 of all API keys' transactions wait for the response store (GPTOSS_RESPONSES_MAX_WAITING).")),
    ],
)
async def test_transactions_above_a_limit_are_refused_and_those_that_wait_are_carried_out(
    tmp_path: Path, of_alice: int, of_bob: int, refused: tuple[int, str] | None
) -> None:
    url = sa.make_url(f"sqlite:///{tmp_path / 'store.sqlite'}")
    database, holds, entered = Database(url, key_waiting=3, max_waiting=5), threading.Event(), threading.Event()
    first = asyncio.create_task(database.run(lambda db: (entered.set(), holds.wait(30))))
    await asyncio.to_thread(entered.wait, 30)
    tasks = []
    for name in ["alice"] * of_alice + ["bob"] * of_bob:
        CALLER.set(name)
        tasks.append(asyncio.create_task(database.run(lambda db: db.scalar(sa.text("SELECT 1")))))
        await asyncio.sleep(0)
    holds.set()
    results = await asyncio.gather(first, *tasks, return_exceptions=True)
    errors = [(one.status, str(one)) for one in results if isinstance(one, StoreError)]
    assert errors == ([refused] if refused else [])
    assert await database.run(lambda db: db.scalar(sa.text("SELECT 1"))) == 1, "their places are free again"
    await database.aclose()


@pytest.mark.parametrize("wait_s", [30.0, 0.2])
async def test_a_close_refuses_reads_and_waits_for_writes_for_a_time(
    tmp_path: Path, wait_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(databases, "CLOSE_WAIT", wait_s)
    database = Database(sa.make_url(f"sqlite:///{tmp_path / 'store.sqlite'}"))
    await database.run(lambda db: db.exec_driver_sql("CREATE TABLE written (name TEXT)"))
    holds, entered = threading.Event(), threading.Event()

    def block(db: sa.Connection) -> None:
        entered.set()
        assert holds.wait(30)

    running = asyncio.create_task(database.run(block))
    await asyncio.to_thread(entered.wait, 30)
    write = asyncio.create_task(database.run(lambda db: db.exec_driver_sql("INSERT INTO written VALUES ('one')")))
    read = asyncio.create_task(database.rows(sa.select(sa.literal(1))))
    await asyncio.sleep(0)
    ends = asyncio.create_task(database.aclose())
    if wait_s < 1:
        await asyncio.wait_for(ends, 10)
    holds.set()
    done = await asyncio.gather(running, write, read, ends, return_exceptions=True)
    with closing(sqlite3.connect(tmp_path / "store.sqlite")) as db:
        written = db.execute("SELECT * FROM written").fetchall()
    kinds = [type(one).__name__ for one in done[1:3]]
    if wait_s < 1:
        assert (kinds, written) == (["CancelledError", "CancelledError"], [])
        assert caplog.text.count("3 transactions are not done, their writes may be lost") == 1
    else:
        assert (kinds, written) == (["CursorResult", "StoreError"], [("one",)])
        assert "it is closed, because the server stops" in str(done[2])
        assert "may be lost" not in caplog.text


async def test_a_closed_store_refuses_work_with_its_own_error(tmp_path: Path) -> None:
    database = Database(sa.make_url(f"sqlite:///{tmp_path / 'store.sqlite'}"))
    await database.aclose()
    with pytest.raises(StoreError, match="it is closed"):
        await database.run(lambda db: db.scalar(sa.select(1)))


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("postgresql+asyncpg://u:p@h/d?ssl=require", "postgresql+psycopg://u:p@h/d?sslmode=require"),
        ("postgres://h/d?application_name=x&ssl=prefer", "postgresql+psycopg://h/d?application_name=x&sslmode=prefer"),
        ("postgresql://h/d?sslmode=verify-full", "postgresql+psycopg://h/d?sslmode=verify-full"),
        ("postgresql+psycopg://h/d", "postgresql+psycopg://h/d"),
        ("postgresql+psycopg_async://h/d", "postgresql+psycopg://h/d"),
        ("postgresql+asyncpg://h/d?prepared_statement_cache_size=0", "postgresql+psycopg://h/d"),
        ("postgres://h/d?prepared_statement_cache_size=100&ssl=allow", "postgresql+psycopg://h/d?sslmode=allow"),
        ("sqlite+aiosqlite:////x.sqlite", "sqlite:////x.sqlite"),
    ],
)
def test_an_address_of_an_earlier_version_is_one_of_psycopg(given: str, used: str) -> None:
    assert ResponsesOptions(store=given).url == used


@pytest.mark.parametrize("scheme", ["mysql", "postgresqls", "mssql+pyodbc"])
def test_another_database_is_refused_with_those_that_work(scheme: str) -> None:
    with pytest.raises(SettingsError, match=f"the store is in SQLite or PostgreSQL, not in {scheme.partition('+')[0]}"):
        databases.check_driver(f"{scheme}://h/d")


@pytest.mark.parametrize("at", ["INSERT INTO gptoss_input_uses", "SELECT gptoss_input_items.id"], ids=["save", "get"])
async def test_no_other_server_replaces_an_item_between_two_statements(tmp_path: Path, at: str) -> None:
    """SQLite gives the number of a deleted row to the next one, here another key's."""
    file = tmp_path / "store.sqlite"
    store = Store(ResponsesOptions(store=str(file)))
    await store.open()
    items = [{"id": "msg_1", "type": "message", "content": "of alice " * 200}]
    replaced = []

    def replace(connection: object, cursor: object, statement: str, *rest: object) -> None:
        del connection, cursor, rest
        if statement.startswith(at) and not replaced:
            replaced.append(statement)
            with closing(sqlite3.connect(file, timeout=0)) as other, suppress(sqlite3.OperationalError):
                other.executescript(REPLACE)

    async def save(name: str) -> None:
        await store.save(Stored(name, "alice", {"id": name, "status": "completed", "output": []}, list(items)))

    await save("resp_1")
    if at.startswith("INSERT"):
        sa.event.listen(store._db.engine, "before_cursor_execute", replace)
    await save("resp_2")
    if at.startswith("SELECT"):
        sa.event.listen(store._db.engine, "before_cursor_execute", replace)
    found = await store.get("alice", "resp_2")
    await store.aclose()
    assert replaced
    assert found is not None
    assert found.input == items
