"""Background responses: followed, resumed, cancelled, queued, and failed when their server died."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from httpx_sse import connect_sse

from tests.support.responses import fakes
from tests.support.responses.events import check_stream, kinds, read
from tests.support.responses.postgres import ALSO_POSTGRES
from tests.support.responses.replay import ReplayEngine
from tests.support.responses.server import MODEL, Running, Script, Start, create, running
from tests.support.responses.turns import HELLO, INTERPRETER, LONG, PYTHON
from tests.support.waiting import soon
from vllm_gptoss.server.http.callers import tenant_of
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.run.background import QUIET, STOPPED
from vllm_gptoss.server.responses.run.engine import HAS_ENDED, NOT_BEGUN
from vllm_gptoss.server.responses.state.event_store import EventStore
from vllm_gptoss.server.responses.state.stored import Stored
from vllm_gptoss.tools.protocol import Text, ToolCall, ToolResult

pytestmark = ALSO_POSTGRES


def follow(http: httpx.Client, identifier: str, after: int | None = None) -> list[dict[str, Any]]:
    query = "?stream=true" + (f"&starting_after={after}" if after is not None else "")
    with connect_sse(http, "GET", f"/responses/{identifier}{query}") as source:
        return read(source.iter_sse())


def test_a_background_response_is_queued_runs_and_ends(start: Start) -> None:
    server = start(HELLO, rate=10.0)  # each event is stored separately
    with server.http() as http:
        made = http.post("/responses", json={"model": MODEL, "input": "hi", "background": True}).json()
        assert made["status"] == "queued"
        events = follow(http, made["id"])
        check_stream(events)
        assert [*kinds(events)[:3], kinds(events)[-1]] == ["created", "queued", "in_progress", "completed"]
        assert http.get(f"/responses/{made['id']}").json() == events[-1]["response"]


def test_a_broken_stream_is_resumed_without_loss(start: Start) -> None:
    server = start(LONG, rate=400.0)
    with server.http() as http:
        body = {"model": MODEL, "input": "hi", "background": True, "stream": True}
        first = []
        with connect_sse(http, "POST", "/responses", json=body) as source:
            for sse in source.iter_sse():
                first.append(sse.json())
                if len(first) == 20:
                    break  # the client goes; the response does not
        identifier = first[0]["response"]["id"]
        assert http.get(f"/responses/{identifier}").json()["status"] == "in_progress"
        rest = follow(http, identifier, first[-1]["sequence_number"])
        check_stream(first + rest)
        assert server.engine.aborted == 0


def test_cancel_stops_the_engine_and_ends_every_follower(start: Start) -> None:
    server = start(LONG, rate=50.0)
    with server.http() as http, server.http() as other:
        body = {"model": MODEL, "input": "hi", "background": True, "stream": True}
        with connect_sse(http, "POST", "/responses", json=body) as source:
            events = source.iter_sse()
            made = json.loads(next(events).data)["response"]
            assert any(event.event.endswith(".delta") for event in events)
        followed: list[dict[str, Any]] = []
        follower = threading.Thread(target=lambda: followed.extend(follow(other, made["id"])))
        follower.start()
        cancelled = http.post(f"/responses/{made['id']}/cancel").raise_for_status().json()
        assert cancelled["status"] == "cancelled"
        assert cancelled["output"][0]["content"][0]["text"], "the text so far stays"
        follower.join(10)
        assert not follower.is_alive()
        assert followed[-1]["response"]["status"] == "cancelled"
        assert http.post(f"/responses/{made['id']}/cancel").json()["status"] == "cancelled"
    assert server.engine.running == 0


def test_another_server_can_follow_and_cancel(start: Start) -> None:
    first = start(LONG, rate=50.0)
    second = start(HELLO)
    with first.http() as http, second.http() as other:
        made = http.post("/responses", json={"model": MODEL, "input": "hi", "background": True}).json()
        cancelled = other.post(f"/responses/{made['id']}/cancel").raise_for_status().json()
        assert cancelled["status"] == "cancelled"
        assert follow(other, made["id"])[-1]["response"]["status"] == "cancelled"
    assert first.engine.running == 0


def test_events_that_are_stored_after_the_response_has_ended_are_not_skipped(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server stores the end of a short response first, and its events while a follower reads."""
    first, second = start(HELLO), start(HELLO)
    with first.http() as http, second.http() as other:
        made = http.post("/responses", json={"model": MODEL, "input": "hi", "background": True}).json()
        events = follow(http, made["id"])
        since, hidden = EventStore.since, [[], []]

        async def late(*given: Any) -> list[tuple[int, str]]:
            return hidden.pop() if hidden else await since(*given)

        monkeypatch.setattr(EventStore, "since", late)
        assert follow(other, made["id"], 2) == events[3:]
        assert not hidden


def test_foreground_responses_cannot_be_cancelled_or_streamed_again(start: Start) -> None:
    server = start(HELLO)
    with server.http() as http:
        made = http.post("/responses", json={"model": MODEL, "input": "hi"}).json()
        assert http.post(f"/responses/{made['id']}/cancel").status_code == 400
        assert http.get(f"/responses/{made['id']}?stream=true").status_code == 400


def test_a_tool_may_take_longer_than_the_heartbeat_and_another_server_cancels_it(start: Start) -> None:
    async def hang(call: ToolCall) -> ToolResult:
        await asyncio.Event().wait()
        raise AssertionError

    tool = fakes.python(hang)
    first = start(PYTHON, providers=[tool])
    second = start(HELLO, config={"heartbeat": 2.0})
    with first.http() as http, second.http() as other:
        body = {"model": MODEL, "input": "hi", "background": True, "tools": [INTERPRETER]}
        made = http.post("/responses", json=body).json()
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            time.sleep(0.1)
            assert other.get(f"/responses/{made['id']}").json()["status"] in ("queued", "in_progress")
        assert other.post(f"/responses/{made['id']}/cancel").raise_for_status().json()["status"] == "cancelled"
    assert tool.cancelled == 1


def test_a_response_deleted_by_another_server_stays_deleted(start: Start) -> None:
    first = start(LONG, rate=100.0)
    second = start(HELLO)
    with first.http() as http, second.http() as other:
        made = http.post("/responses", json={"model": MODEL, "input": "hi", "background": True}).json()
        soon(lambda: first.engine.running == 1)
        assert other.delete(f"/responses/{made['id']}").json()["deleted"] is True
        soon(lambda: first.engine.running == 0)
        for _ in range(10):
            time.sleep(0.05)
            assert http.get(f"/responses/{made['id']}").status_code == 404
        assert first.call(first.endpoint.service.context.store.background.since(made["id"], -1)) == []


def test_of_two_servers_that_end_a_response_one_wins(start: Start) -> None:
    """A server that was paused for longer than the heartbeat comes back to a response that has been failed."""
    first = start(LONG, rate=40.0)
    second = start(HELLO, config={"heartbeat": 0.0})
    with first.http() as http, second.http() as other:
        made = http.post("/responses", json={"model": MODEL, "input": "hi", "background": True}).json()
        soon(lambda: first.engine.running == 1)
        soon(lambda: other.get(f"/responses/{made['id']}").json()["status"] == "failed")
        soon(lambda: first.engine.running == 0)
        for _ in range(10):
            time.sleep(0.05)
            assert http.get(f"/responses/{made['id']}").json()["status"] == "failed"
        events = follow(http, made["id"])
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.failed"


def test_many_that_look_at_a_dead_response_hear_the_same(start: Start) -> None:
    server = start(HELLO)
    store = server.endpoint.service.context.store
    with server.http() as http:
        made = create(http, input="hi")
        dead = Stored(
            "resp_dead",
            tenant_of("Bearer alice"),
            {**made, "id": "resp_dead", "status": "in_progress", "background": True},
            beat=1.0,
        )
        server.call(store.save(dead))
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda _: http.get("/responses/resp_dead"), range(16)))
        assert [answer.status_code for answer in answers] == [200] * 16
        assert {answer.json()["status"] for answer in answers} == {"failed"}
        assert [event["type"] for event in follow(http, "resp_dead")] == ["response.failed"]


def test_cancelling_what_has_ended_gives_what_it_ended_as(start: Start) -> None:
    """OpenAI's API reference: cancelling again returns the final response."""
    server = start(HELLO)
    with server.http() as http:
        made = http.post("/responses", json={"model": MODEL, "input": "hi", "background": True}).json()
        ended = follow(http, made["id"])[-1]["response"]
        assert http.post(f"/responses/{made['id']}/cancel").raise_for_status().json() == ended


def counted(server: Running) -> list[str]:
    """The beginning of every statement that the server's store is given from now on."""
    found: list[str] = []
    store = server.endpoint.service.context.store
    assert store is not None

    @sa.event.listens_for(store._db.engine, "before_cursor_execute")
    def count(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        del connection, cursor, rest
        found.append(" ".join(statement.split()))

    return found


def test_a_follower_beside_the_response_reads_what_is_written_from_memory(start: Start) -> None:
    server = start(LONG, rate=200.0)
    statements = counted(server)
    with server.http() as http:
        fields = {"model": MODEL, "input": "hi", "background": True, "stream": True}
        with connect_sse(http, "POST", "/responses", json=fields) as source:
            events = read(source.iter_sse())
        check_stream(events)
        writes = sum(statement.startswith("INSERT INTO gptoss_events") for statement in statements)
        assert writes >= 3, "as they come"
        reads = [each for each in statements if each.startswith("SELECT gptoss_events.sequence, gptoss_events.data")]
        assert len(reads) <= 5, "before it is followed, and when it has gone from memory"
        assert follow(http, events[-1]["response"]["id"]) == events


def test_who_comes_back_late_reads_the_store_and_then_goes_on_from_memory(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_gptoss.server.responses.run.background.RECENT", 5)
    server = start(LONG, rate=100.0)
    with server.http() as http, ThreadPoolExecutor(3) as pool:
        made = http.post("/responses", json={"model": MODEL, "input": "hi", "background": True}).json()
        followers = []
        for after in (None, 3, 40):
            soon(lambda: len(server.call(server.endpoint.service.context.store.background.since(key(made), -1))) > 60)
            followers.append(pool.submit(follow, http, made["id"], after))
        whole, *parts = [follower.result() for follower in followers]
    check_stream(whole)
    assert [part == whole[after + 1 :] for part, after in zip(parts, (3, 40), strict=True)] == [True, True]


def key(made: dict[str, Any]) -> str:
    return Stored(made["id"], tenant_of("Bearer alice"), made, [], {}).key


def test_events_that_nobody_follows_are_written_less_often(start: Start) -> None:
    server = start(LONG, rate=200.0)
    statements, began = counted(server), time.monotonic()
    with server.http() as http:
        made = http.post("/responses", json={"model": MODEL, "input": "hi", "background": True}).json()
        soon(lambda: http.get(f"/responses/{made['id']}").json()["status"] == "completed")
        check_stream(follow(http, made["id"]))
    writes = sum(statement.startswith("INSERT INTO gptoss_events") for statement in statements)
    assert 2 <= writes <= (time.monotonic() - began) / QUIET + 3


def test_writes_of_one_response_do_not_overlap(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of events that two transactions write would count twice for the quota."""
    append, running, most = EventStore.append, 0, 0

    async def slow(*given: Any, **named: Any) -> bool:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.3)
        running -= 1
        return await append(*given, **named)

    monkeypatch.setattr(EventStore, "append", slow)
    with start(LONG, rate=40.0).http() as http:
        check_stream(follow(http, create(http, input="hi", background=True, max_output_tokens=40)["id"]))
    assert most == 1


@pytest.mark.parametrize("patience", [0.0, 300.0])
def test_a_server_that_is_stopped_lets_responses_end_or_fails_them_by_name(tmp_path: Path, patience: float) -> None:
    """SIGTERM, or Ray Serve that scales down: without followers no connection delays the server's end."""
    options = ResponsesOptions(store=str(tmp_path / "store.sqlite"))
    hanging = asyncio.Event()
    tool = fakes.python(lambda call: hang(call, hanging) if not patience else ran(call))
    engine = ReplayEngine(Script(PYTHON, LONG), rate=200.0)
    body = {"model": MODEL, "input": "hi", "background": True, "tools": [INTERPRETER]}
    with running(engine, options, [tool]) as server, server.http() as http:
        server.endpoint.patience = patience
        made = http.post("/responses", json=body).raise_for_status().json()
        soon(lambda: len(tool.calls) == 1)
    with running(ReplayEngine(Script(HELLO)), options) as server, server.http() as http:
        found = http.get(f"/responses/{made['id']}").json()
        assert found["status"] == ("completed" if patience else "failed")
        assert (found["error"] or {}).get("message") == (None if patience else STOPPED)
        events = follow(http, made["id"])
        check_stream(events)
        assert events[-1]["response"] == found


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_tool_that_answers_while_the_engine_stops_ends_a_response_that_says_why(
    start: Start, has_ended: bool
) -> None:
    """vLLM's engine takes no request from SIGTERM on, not even the next one of a response that has begun."""
    answers = threading.Event()

    async def slow(call: ToolCall) -> ToolResult:
        await asyncio.to_thread(answers.wait)
        return await ran(call)

    tool = fakes.python(slow)
    server = start(PYTHON, providers=[tool])
    with server.http() as http:
        made = create(http, input="hi", background=True, tools=[INTERPRETER])
        soon(lambda: len(tool.calls) == 1)
        server.engine.ended, server.engine.drains = has_ended, True
        answers.set()
        events = follow(http, made["id"])
        check_stream(events)
        found = http.get(f"/responses/{made['id']}").json()
    assert events[-1]["response"] == found
    assert found["status"] == "failed"
    assert found["error"]["message"] == (HAS_ENDED if has_ended else NOT_BEGUN)
    assert [item["type"] for item in found["output"]][-1] == "code_interpreter_call", "the finished call stays"


def test_who_waits_for_a_tool_when_the_engine_has_ended_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Under `vllm serve` the engine ends before the plugin is closed: waiting for the tool would be useless."""
    options = ResponsesOptions(store=str(tmp_path / "store.sqlite"))
    tool = fakes.python(lambda call: hang(call, asyncio.Event()))
    with running(ReplayEngine(Script(PYTHON)), options, [tool]) as server, server.http() as http:
        server.endpoint.patience = 300.0
        made = create(http, input="hi", background=True, tools=[INTERPRETER])
        soon(lambda: len(tool.calls) == 1)
        server.engine.ended = True
    with running(ReplayEngine(Script(HELLO)), options) as server, server.http() as http:
        assert http.get(f"/responses/{made['id']}").json()["error"]["message"] == STOPPED


async def ran(call: ToolCall) -> ToolResult:
    return ToolResult([Text(call.arguments)])


async def hang(call: ToolCall, until: asyncio.Event) -> ToolResult:
    await until.wait()
    return await ran(call)


def test_who_cancels_twice_cancels_once(start: Start) -> None:
    """A second cancel broke off the first one's last words: the response hung until it was taken for dead."""

    async def slow_to_stop(call: ToolCall) -> ToolResult:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.3)
        raise AssertionError

    tool = fakes.python(slow_to_stop)
    server = start(PYTHON, providers=[tool], config={"heartbeat": 600.0})
    with server.http() as http, ThreadPoolExecutor(5) as pool:
        body = {"model": MODEL, "input": "hi", "background": True, "tools": [INTERPRETER]}
        for _ in range(3):
            made = http.post("/responses", json=body).json()
            soon(lambda: len(tool.calls) > tool.cancelled)
            cancelled = list(pool.map(lambda _, made=made: http.post(f"/responses/{made['id']}/cancel"), range(5)))
            assert [answer.json()["status"] for answer in cancelled] == ["cancelled"] * 5
            events = follow(http, made["id"])
            check_stream(events)
            assert events[-1]["response"]["status"] == "cancelled"


def test_each_key_has_so_many_background_responses_at_most(start: Start) -> None:
    server = start(LONG, rate=20.0, config={"max_background": 2, "total_background": 3})
    body = {"model": MODEL, "input": "hi", "background": True}
    with server.http("alice") as alice, server.http("bob") as bob:
        first = alice.post("/responses", json=body).raise_for_status().json()["id"]
        alice.post("/responses", json=body).raise_for_status()
        refused = alice.post("/responses", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (429, "background")
        bob.post("/responses", json=body).raise_for_status()
        assert bob.post("/responses", json=body).status_code == 503
        alice.post(f"/responses/{first}/cancel").raise_for_status()
        soon(lambda: alice.post("/responses", json=body).status_code == 200)


def test_background_responses_of_a_key_beyond_those_at_once_wait_in_the_queue(start: Start) -> None:
    server = start(LONG, rate=100.0, config={"running_background": 1})
    body = {"model": MODEL, "input": "hi", "background": True}
    with server.http("alice") as alice, server.http("bob") as bob, ThreadPoolExecutor(1) as pool:
        first, second, third = (create(alice, **body)["id"] for _ in range(3))
        soon(lambda: server.engine.running == 1)
        followed = pool.submit(follow, alice, second)
        assert alice.post(f"/responses/{third}/cancel").raise_for_status().json()["status"] == "cancelled"
        assert alice.get(f"/responses/{second}").json()["status"] == "queued"
        assert len(server.engine.prompts) == 1
        create(bob, **body)
        soon(lambda: server.engine.running == 2)
        soon(lambda: alice.get(f"/responses/{first}").json()["status"] == "in_progress")
        events = followed.result(60)
        assert alice.get(f"/responses/{first}").json()["status"] == "completed"
    check_stream(events)
    assert [event["type"] for event in events[:3]] == [f"response.{k}" for k in ("created", "queued", "in_progress")]
    assert len(server.engine.prompts) == 3
