"""The store on a real PostgreSQL: a database that goes away; test_state.py and test_background.py run on it too."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext, suppress

import pytest
import pytest_asyncio
import sqlalchemy as sa
from httpx_sse import connect_sse

from tests.support.responses.events import read
from tests.support.responses.postgres import Postgres
from tests.support.responses.server import MODEL, Start, create, harmony
from tests.support.responses.stores import opened
from tests.support.responses.turns import HELLO
from tests.support.waiting import soon
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.run.context import ContainerOwners
from vllm_gptoss.server.responses.state import database as databases
from vllm_gptoss.server.responses.state import patience
from vllm_gptoss.server.responses.state.store import Store
from vllm_gptoss.server.responses.state.stored import LostError, Stored, StoreError
from vllm_gptoss.server.responses.state.upgrade import STEPS, UpgradeStep, upgrade
from vllm_gptoss.tools.protocol import CALLER

pytestmark = pytest.mark.parametrize("database", ["postgres"], indirect=True)


@pytest_asyncio.fixture
async def store(database: None) -> AsyncIterator[Store]:
    async with opened(os.environ["GPTOSS_TEST_STORE"]) as store:
        yield store


@pytest_asyncio.fixture
async def transactions(database: None) -> AsyncIterator[databases.Database]:
    made = databases.Database(sa.make_url(ResponsesOptions(store=os.environ["GPTOSS_TEST_STORE"]).url or ""))
    yield made
    await made.aclose()


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


@pytest.mark.parametrize("where", ["alone", "conversation"])
def test_a_background_response_that_ends_while_the_database_is_away_is_kept(
    start: Start, postgres: Postgres, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for the database, with its events and its items; it costs a line in the log and no traceback."""
    is_away = threading.Event()

    def says(prompt: Sequence[int]) -> list[int]:
        assert is_away.wait(60)
        return harmony(HELLO)

    with start(says).http() as http:
        fields = {"conversation": http.post("/conversations", json={}).json()["id"]} if where == "conversation" else {}
        made = http.post("/responses", json={"model": MODEL, "input": "hi", "background": True, **fields}).json()["id"]
        postgres.stop()
        try:
            is_away.set()
            soon(lambda: any("waits to be stored" in record.getMessage() for record in caplog.records))
        finally:
            postgres.start()
        soon(lambda: http.get(f"/responses/{made}").json().get("status") in ("completed", "failed"))
        found = http.get(f"/responses/{made}").json()
        assert found["status"] == "completed", found["error"]
        with connect_sse(http, "GET", f"/responses/{made}?stream=true") as source:
            events = read(source.iter_sse())
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
        if where == "conversation":
            items = http.get(f"/conversations/{fields['conversation']}/items").json()["data"]
            kinds = sorted(item["type"] for item in items)
            assert kinds == ["message", "message", "reasoning"], "once, not at each attempt"
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_commit_that_is_not_answered_is_not_taken_for_another_servers(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database commits and dies before its answer: the second attempt finds the response ended by this server."""
    monkeypatch.setattr(patience, "RETRY", 0.0)
    running = {"id": "resp_1", "status": "in_progress", "output": []}
    await store.save(Stored("resp_1", "alice", running))
    write, attempts = store.update, []

    async def unanswered(stored: Stored, conversation: str | None = None) -> None:
        await write(stored, conversation)
        attempts.append(stored)
        raise StoreError("the connection broke")

    monkeypatch.setattr(store, "update", lambda *given: (unanswered if not attempts else write)(*given))
    await patience.update_at_last(store, Stored("resp_1", "alice", {**running, "status": "completed"}), None)
    other = Stored("resp_1", "alice", {**running, "status": "completed", "output": [{"id": "msg_1"}]})
    with pytest.raises(LostError):
        await patience.update_at_last(store, other, None)


async def test_the_owner_of_a_container_that_could_not_be_written_is_written_with_the_next_call(
    store: Store, postgres: Postgres
) -> None:
    owners = ContainerOwners(store)
    postgres.stop()
    try:
        await owners.remember("cntr_1", "alice", "alice:root")
    finally:
        postgres.start()
    assert await store.containers.get("cntr_1") is None
    await owners.remember("cntr_1", "alice", "alice:root")
    assert await store.containers.get("cntr_1") == ("alice", "alice:root")


async def test_responses_that_share_new_items_in_another_order_are_all_stored(store: Store) -> None:
    """Without one order of the inserts the database ends one of the transactions: `deadlock detected`."""

    def response(number: int, turn: int) -> Stored:
        items = [{"id": f"msg_{turn}_{n}", "type": "message", "content": f"{turn} {n} " * 20} for n in range(60)]
        name = f"resp_{turn}_{number}"
        ended = {"id": name, "status": "completed", "output": []}
        return Stored(name, "alice", ended, items[::-1] if number % 2 else items)

    for turn in range(3):
        await asyncio.gather(*(store.save(response(number, turn)) for number in range(4)))


async def test_transactions_that_deadlock_are_both_carried_out(transactions: databases.Database) -> None:
    """As an eviction and a save do that use the same input items in another order."""
    await transactions.run(lambda db: db.exec_driver_sql("CREATE TABLE counts (id INT PRIMARY KEY, n INT)"))
    await transactions.run(lambda db: db.exec_driver_sql("INSERT INTO counts VALUES (1, 0), (2, 0)"))
    both = threading.Barrier(2)

    def count(order: tuple[int, int], db: sa.Connection) -> None:
        db.exec_driver_sql(f"UPDATE counts SET n = n + 1 WHERE id = {order[0]}")
        with suppress(threading.BrokenBarrierError):
            both.wait(10)
        both.abort()  # second attempts do not wait
        db.exec_driver_sql(f"UPDATE counts SET n = n + 1 WHERE id = {order[1]}")

    async def of_key(key: str, order: tuple[int, int]) -> None:
        CALLER.set(key)
        await transactions.run(functools.partial(count, order))

    await asyncio.gather(of_key("alice", (1, 2)), of_key("bob", (2, 1)))
    rows = await transactions.run(lambda db: db.exec_driver_sql("SELECT n FROM counts").scalars().all())
    await transactions.run(lambda db: db.exec_driver_sql("DROP TABLE counts"))
    assert rows == [2, 2]


@pytest.mark.parametrize(("failures", "attempts"), [(2, 3), (3, 3)])
async def test_a_serialization_failure_is_repeated_twice(
    transactions: databases.Database, failures: int, attempts: int
) -> None:
    made: list[int] = []

    def fail(db: sa.Connection) -> None:
        made.append(1)
        if len(made) <= failures:
            db.exec_driver_sql("DO $$ BEGIN RAISE EXCEPTION 'concurrent update' USING ERRCODE = '40001'; END $$")

    failed = pytest.raises(StoreError, match="The response store failed: OperationalError: concurrent update")
    with failed if failures == attempts else nullcontext():
        await transactions.run(fail)
    assert len(made) == attempts


async def test_a_response_that_another_server_deletes_while_it_is_read_is_not_there(store: Store) -> None:
    items = [{"id": "msg_1", "type": "message", "content": "of alice " * 200}]
    await store.save(Stored("resp_1", "alice", {"id": "resp_1", "status": "completed", "output": []}, items))
    event_loop, deleted = asyncio.get_running_loop(), []

    def delete(connection: object, cursor: object, statement: str, *rest: object) -> None:
        del connection, cursor, rest
        if statement.startswith("SELECT gptoss_input_items.id") and not deleted:
            deleted.append(asyncio.run_coroutine_threadsafe(other.delete("alice", "resp_1"), event_loop).result(30))

    sa.event.listen(store._db.engine, "before_cursor_execute", delete)
    async with opened(os.environ["GPTOSS_TEST_STORE"]) as other:
        assert await store.get("alice", "resp_1") is None
    assert deleted == [True]


async def test_transactions_of_one_key_leave_a_thread_to_others(transactions: databases.Database) -> None:
    """Twice as many slow transactions as there are threads; another key's is not behind them."""
    CALLER.set("alice")
    slow = [
        asyncio.create_task(transactions.run(lambda db: db.exec_driver_sql("SELECT pg_sleep(2)"))) for _ in range(16)
    ]
    await asyncio.sleep(0.5)  # until every thread that takes them has one
    CALLER.set("bob")
    began = time.monotonic()
    await transactions.run(lambda db: db.exec_driver_sql("SELECT 1"))
    assert time.monotonic() - began < 1
    assert not any(each.done() for each in slow)
    await asyncio.gather(*slow)


async def test_no_statement_is_prepared(transactions: databases.Database) -> None:
    """A pooler in transaction mode runs a client's transactions on connections that do not have it."""

    def prepared(db: sa.Connection) -> int | None:
        for _ in range(10):
            db.execute(sa.text("SELECT :n + 1"), {"n": 1})
        return db.scalar(sa.text("SELECT count(*) FROM pg_prepared_statements"))

    assert await transactions.run(prepared) == 0


def test_a_step_of_an_upgrade_takes_longer_than_a_statement_may(
    database: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "STATEMENT_TIMEOUT", "SET statement_timeout = '300ms'")
    sleep = "SELECT pg_sleep(0.6)"

    def wait(db: sa.Connection) -> None:
        db.exec_driver_sql(sleep)

    slow = UpgradeStep(STEPS[-1].version + 1, "waits", wait)
    engine = databases.connect(sa.make_url(ResponsesOptions(store=os.environ["GPTOSS_TEST_STORE"]).url or ""))
    with engine.begin() as db:
        upgrade(db, (*STEPS, slow))
    with pytest.raises(sa.exc.OperationalError, match="statement timeout"), engine.begin() as db:
        db.exec_driver_sql(sleep)
    engine.dispose()


async def test_no_log_line_has_the_password(
    database: None, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = os.environ["GPTOSS_TEST_STORE"].replace("postgres@", "postgres:hunter2@")
    with caplog.at_level(logging.INFO):
        start(HELLO, config={"store": url})
    assert "store postgresql+psycopg://postgres:***@" in caplog.text
    assert "hunter2" not in caplog.text
