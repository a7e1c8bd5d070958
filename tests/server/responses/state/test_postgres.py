"""The store on a real PostgreSQL: a database that goes away; test_state.py and test_background.py run on it too."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import pytest
from httpx_sse import connect_sse

from tests.support.responses.events import read
from tests.support.responses.postgres import Postgres
from tests.support.responses.server import MODEL, Start, create, harmony
from tests.support.responses.turns import HELLO
from tests.support.waiting import soon
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.run.context import ContainerOwners
from vllm_gptoss.server.responses.state import patience
from vllm_gptoss.server.responses.state.store import Store
from vllm_gptoss.server.responses.state.stored import LostError, Stored, StoreError

pytestmark = pytest.mark.parametrize("database", ["postgres"], indirect=True)


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
    database: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database commits and dies before its answer: the second attempt finds the response ended by this server."""
    monkeypatch.setattr(patience, "RETRY", 0.0)
    store = Store(ResponsesOptions(store=os.environ["GPTOSS_TEST_STORE"]))
    await store.open()
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
    await store.aclose()


async def test_the_owner_of_a_container_that_could_not_be_written_is_written_with_the_next_call(
    database: None, postgres: Postgres
) -> None:
    store = Store(ResponsesOptions(store=os.environ["GPTOSS_TEST_STORE"]))
    await store.open()
    owners = ContainerOwners(store)
    postgres.stop()
    try:
        await owners.remember("cntr_1", "alice", "alice:root")
    finally:
        postgres.start()
    assert await store.containers.get("cntr_1") is None
    await owners.remember("cntr_1", "alice", "alice:root")
    assert await store.containers.get("cntr_1") == ("alice", "alice:root")
    await store.aclose()
