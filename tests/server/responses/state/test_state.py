"""Stored state: chains, items, conversations, compaction, encrypted reasoning, and its owners."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from httpx_sse import connect_sse
from websockets.sync.client import connect

from tests.support.responses import fakes
from tests.support.responses.events import stream
from tests.support.responses.postgres import ALSO_POSTGRES
from tests.support.responses.server import MODEL, Start, create
from tests.support.responses.stores import opened
from tests.support.responses.turns import CALL, HELLO, INTERPRETER, LONG, PYTHON, SEARCH, WEATHER
from tests.support.waiting import soon
from vllm_gptoss.server.http.callers import tenant_of
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.state.store import Store
from vllm_gptoss.server.responses.state.stored import Stored, StoreError

pytestmark = ALSO_POSTGRES


def test_a_stored_response_is_read_listed_and_deleted(start: Start) -> None:
    server = start(HELLO)
    with server.http() as http:
        body = create(http, input="hi")
        assert http.get(f"/responses/{body['id']}").json() == body
        items = http.get(f"/responses/{body['id']}/input_items").json()
        assert [item["content"][0]["text"] for item in items["data"]] == ["hi"]
        assert http.delete(f"/responses/{body['id']}").json()["deleted"] is True
        assert http.get(f"/responses/{body['id']}").status_code == 404
        assert http.delete(f"/responses/{body['id']}").status_code == 404


def test_input_items_are_what_the_model_was_given(start: Start) -> None:
    server = start(CALL, HELLO)
    with server.http() as http:
        first = create(http, input="hi", tools=[WEATHER])
        call = first["output"][-1]
        answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        second = create(http, input=[answer], previous_response_id=first["id"], tools=[WEATHER])
        third = create(http, input="thanks", previous_response_id=second["id"])

        def kinds(**query: Any) -> list[str]:
            listed = http.get(f"/responses/{third['id']}/input_items", params={"order": "asc", **query}).json()
            return [item["type"] for item in listed["data"]]

        said = [item["type"] for item in first["output"]]
        after = ["function_call_output", *(item["type"] for item in second["output"]), "message"]
        assert kinds() == ["message", *said, *after]
        assert kinds(limit=2) == ["message", said[0]]
        http.delete(f"/responses/{first['id']}").raise_for_status()
        assert kinds() == after


def test_typed_client_reads_lists_and_deletes(start: Start) -> None:
    server = start(HELLO)
    client = server.client()
    made = client.responses.create(model=MODEL, input="hi")
    assert client.responses.retrieve(made.id).output_text == "Hello there!"
    assert [item.type for item in client.responses.input_items.list(made.id)] == ["message"]
    assert client.responses.input_tokens.count(model=MODEL, input="hi").input_tokens == made.usage.input_tokens  # type: ignore[union-attr]
    client.responses.delete(made.id)


def test_a_followup_has_its_own_instructions_and_tools(start: Start) -> None:
    server = start(HELLO)
    with server.http() as http:
        first = create(http, input="hi", instructions="Speak like a pirate.", tools=[WEATHER])
        create(http, input="again", instructions="Speak like a judge.", previous_response_id=first["id"])
    prompt = server.prompt()
    assert "judge" in prompt
    assert "pirate" not in prompt
    assert "get_weather" not in prompt
    assert "Hello there!" in prompt


def test_store_false_is_not_kept(start: Start) -> None:
    server = start(HELLO)
    with server.http() as http:
        made = create(http, input="hi", store=False)
        assert made["store"] is False
        assert http.get(f"/responses/{made['id']}").status_code == 404


def test_every_output_item_can_be_sent_back(start: Start) -> None:
    """The stateless pattern: input += output. [ran] upstream refuses all but four kinds."""
    providers = [fakes.python(), fakes.browser(), fakes.mcp()]
    mcp = ' to=weather.lookup<|channel|>commentary json<|message|>{"city":"Rome"}<|call|>'
    server = start(PYTHON, SEARCH, mcp, CALL, HELLO, providers=providers)
    tools = [
        WEATHER,
        INTERPRETER,
        {"type": "web_search"},
        {"type": "mcp", "server_label": "weather", "require_approval": "never"},
    ]
    with server.http() as http:
        items: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        first = stream(http, {"model": MODEL, "input": items, "tools": tools})[-1]["response"]
        expected = {
            "reasoning",
            "code_interpreter_call",
            "web_search_call",
            "mcp_list_tools",
            "mcp_call",
            "function_call",
        }
        assert {item["type"] for item in first["output"]} == expected
        answer = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "warm"}
        items += [*first["output"], answer]
        stream(http, {"model": MODEL, "input": items, "tools": tools})
    prompt = server.prompt()
    for seen in ("ran print(1)", "L1: cats purr", "sunny", "warm", "Look it up."):
        assert seen in prompt, f"the prompt must contain the tools' outputs: {seen}"


def test_what_a_tool_said_survives_any_number_of_echoes(start: Start) -> None:
    """Every turn is stored, and each but the first has the call only as its client sent it."""
    server = start(PYTHON, CALL, providers=[fakes.python()])
    tools = [INTERPRETER, WEATHER]
    with server.http() as http:
        history: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        for _ in range(5):
            history += create(http, input=history, tools=tools)["output"]
            history.append({"type": "function_call_output", "call_id": history[-1]["call_id"], "output": "sunny"})
            assert "ran print(1)" in server.prompt()
            assert "is not available any more" not in server.prompt()


def test_an_item_reference_stands_for_the_item(start: Start) -> None:
    server = start(HELLO)
    with server.http() as http:
        first = create(http, input="hi")
        items = [
            {"type": "item_reference", "id": first["output"][-1]["id"]},
            {"role": "user", "content": "what did you say?"},
        ]
        create(http, input=items)
        assert "<|channel|>final<|message|>Hello there!" in server.prompt()
        missing = {"model": MODEL, "input": [{"type": "item_reference", "id": "msg_none"}]}
        assert http.post("/responses", json=missing).json()["error"]["param"] == "input[0].id"


def test_sealed_reasoning_comes_back_readable_only_for_its_key(start: Start) -> None:
    server = start(CALL, HELLO)
    ask = {"model": MODEL, "input": "?", "tools": [WEATHER], "store": False, "include_reasoning": False}
    with server.http("alice") as alice, server.http("bob") as bob:
        first = stream(alice, {**ask, "include": ["reasoning.encrypted_content"]})[-1]["response"]
        reasoning, call = first["output"]
        assert "content" not in reasoning
        assert "Look it up" not in reasoning["encrypted_content"]
        answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        again = {**ask, "input": [{"role": "user", "content": "?"}, reasoning, call, answer]}
        stream(alice, again)
        assert "Look it up." in server.prompt()
        error = bob.post("/responses", json=again).json()["error"]
        assert error["param"] == "input[1].encrypted_content"


@pytest.mark.parametrize(("reasoning", "summary"), [({}, []), ({"summary": "concise"}, ["First."])])
def test_reasoning_that_is_not_shown_is_still_there_for_the_next_turn(
    start: Start, reasoning: dict[str, str], summary: list[str]
) -> None:
    server = start(CALL.replace("Look it up.", "First. Second."), HELLO)
    ask = {"model": MODEL, "input": "?", "tools": [WEATHER], "include_reasoning": False}
    with server.http() as http:
        first = stream(http, {**ask, "reasoning": reasoning})[-1]["response"]
        *shown, call = first["output"]
        assert [part["text"] for item in shown for part in item["summary"]] == summary
        answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        stream(http, {**ask, "input": [answer], "previous_response_id": first["id"]})
    assert "First. Second." in server.prompt()


def test_a_conversation_grows_by_input_and_output(start: Start) -> None:
    server = start(HELLO)
    client = server.client()
    conversation = client.conversations.create(metadata={"topic": "greetings"})
    made = client.responses.create(model=MODEL, input="hi", conversation=conversation.id)
    assert made.conversation is not None
    assert made.conversation.id == conversation.id
    client.responses.create(model=MODEL, input="again", conversation=conversation.id)
    assert "Hello there!" in server.prompt()
    kept = [item.type for item in client.conversations.items.list(conversation.id, order="asc")]
    assert kept == ["message", "reasoning", "message"] * 2
    assert client.conversations.update(conversation.id, metadata={"topic": "x"}).metadata == {"topic": "x"}
    first = next(iter(client.conversations.items.list(conversation.id, order="asc", limit=1)))
    client.conversations.items.delete(first.id, conversation_id=conversation.id)
    assert client.conversations.delete(conversation.id).deleted
    with server.http("bob") as bob:
        body = {"model": MODEL, "input": "hi", "conversation": conversation.id}
        assert bob.post("/responses", json=body).status_code == 404


def test_a_conversation_is_one_responses_at_a_time(start: Start) -> None:
    """OpenAI's own error, in its words and with its code: a second response would not know of the first."""
    first, second = start(LONG, rate=50.0), start(HELLO)
    with first.http() as http, second.http() as other:
        conversation = http.post("/conversations", json={}).json()["id"]
        ask = {"model": MODEL, "input": "hi", "conversation": conversation}
        with connect_sse(http, "POST", "/responses", json={**ask, "stream": True}) as source:
            events = source.iter_sse()
            next(events)
            for client in (http, other):
                refused = client.post("/responses", json=ask)
                assert refused.status_code == 400
                assert refused.json()["error"] == {
                    "message": "Another process is currently operating on this conversation."
                    " Please retry in a few seconds.",
                    "type": "invalid_request_error",
                    "param": "conversation",
                    "code": "conversation_locked",
                }
            assert other.post("/responses/input_tokens", json=ask).status_code == 200, "counting changes nothing"
            assert other.post("/responses", json={"model": MODEL, "input": "hi"}).status_code == 200
        # The client went away: what it held is free again.
        soon(lambda: other.post("/responses", json=ask).status_code == 200)
        assert other.post("/responses", json=ask).status_code == 200, "and again after a response that was completed"
        refused = other.post("/responses", json={**ask, "tools": [{"type": "web_search"}]})
        assert refused.status_code == 400, "a request that is refused holds nothing"
        assert other.post("/responses", json=ask).status_code == 200
        background = {**ask, "background": True}
        made = http.post("/responses", json=background).json()
        assert other.post("/responses", json=ask).json()["error"]["code"] == "conversation_locked"
        http.post(f"/responses/{made['id']}/cancel").raise_for_status()
        assert other.post("/responses", json=ask).status_code == 200


def test_a_conversation_of_a_dead_server_is_free_after_a_while(start: Start) -> None:
    server = start(LONG, HELLO, rate=2000.0, config={"heartbeat": 0.6})
    with server.http() as http:
        conversation = http.post("/conversations", json={}).json()["id"]
        rows = server.endpoint.service.context.store.conversations  # type: ignore[union-attr]
        tenant = tenant_of("Bearer alice")
        assert server.call(rows.hold(tenant, conversation, "resp_dead", 1.5))
        server.call(rows.release(conversation, "resp_other"))
        ask = {"model": MODEL, "input": "hi", "conversation": conversation}
        assert http.post("/responses", json=ask).json()["error"]["code"] == "conversation_locked"
        soon(lambda: http.post("/responses", json=ask).status_code == 200)


def test_a_long_response_keeps_its_conversation(start: Start) -> None:
    server = start(LONG, rate=30.0, config={"heartbeat": 1.5})  # 13 s; a heartbeat that a busy machine keeps
    with server.http() as http:
        ask = {"model": MODEL, "input": "hi", "conversation": http.post("/conversations", json={}).json()["id"]}
        with connect_sse(http, "POST", "/responses", json={**ask, "stream": True}) as source:
            events = source.iter_sse()
            next(events)
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                time.sleep(0.1)
                assert http.post("/responses", json=ask).json()["error"]["code"] == "conversation_locked"
        brief = {**ask, "max_output_tokens": 16}
        soon(lambda: http.post("/responses", json=brief).status_code == 200)
        for _ in range(4):
            time.sleep(0.1)
            assert http.post("/responses", json=brief).status_code == 200, "an ended response renews nothing"


def test_a_conversation_that_is_deleted_meanwhile_leaves_nothing(start: Start) -> None:
    server = start(LONG, rate=200.0)
    with server.http() as http:
        conversation = http.post("/conversations", json={}).json()["id"]
        ask = {"model": MODEL, "input": "hi", "conversation": conversation, "stream": True, "max_output_tokens": 40}
        with connect_sse(http, "POST", "/responses", json=ask) as source:
            events = source.iter_sse()
            next(events)
            http.delete(f"/conversations/{conversation}").raise_for_status()
            kinds = [event.event for event in events]
        assert "response.incomplete" in kinds
        assert server.call(server.endpoint.service.context.store.conversations.items(conversation)) == []  # type: ignore[union-attr]


def test_compaction_keeps_the_users_words_and_seals_the_rest(start: Start) -> None:
    summary = "<|channel|>final<|message|>They greeted.<|return|>"
    server = start(summary, HELLO)
    with server.http() as http:
        items = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "secret words"}]
        compacted = http.post("/responses/compact", json={"model": MODEL, "input": items}).raise_for_status().json()
        assert [item["type"] for item in compacted["output"]] == ["message", "compaction"]
        again = [*compacted["output"], {"role": "user", "content": "go on"}]
        create(http, input=again)
        assert "They greeted." in server.prompt()
        assert "secret words" not in server.prompt()
        altered = {**compacted["output"][1], "encrypted_content": compacted["output"][1]["encrypted_content"][:-4]}
        bad = http.post("/responses", json={"model": MODEL, "input": [altered]})
        assert bad.json()["error"]["code"] == "invalid_encrypted_content"
        assert http.post("/responses/compact", json={"input": items}).json()["error"]["param"] == "model"


def test_truncation_drops_the_oldest_and_only_when_asked(start: Start) -> None:
    server = start(HELLO, max_model_len=300)
    items = [{"role": "user", "content": f"message {n} " + "word " * 40} for n in range(10)]
    with server.http() as http:
        error = http.post("/responses", json={"model": MODEL, "input": items}).json()["error"]
        assert error["code"] == "context_length_exceeded"
        create(http, input=items, truncation="auto", max_output_tokens=50)
    assert "message 9" in server.prompt()
    assert "message 0" not in server.prompt()
    assert len(server.engine.prompts[-1]) <= 250


def test_retention_and_size_limits_remove_the_oldest(start: Start) -> None:
    server = start(HELLO, config={"key_bytes": 6000})
    with server.http() as http:
        made = [create(http, input=f"hi {n}")["id"] for n in range(6)]
        left = [http.get(f"/responses/{one}").status_code == 200 for one in made]
        assert left == sorted(left), "the oldest go first"
        assert 0 < sum(left) < 6
    _counts_what_is_large(start)
    with start(HELLO).http() as http:
        last = create(http, input="hi")["id"]
        assert http.get(f"/responses/{last}").status_code == 200
    with start(HELLO, config={"retention": 0.000001}).http() as http:
        assert http.get(f"/responses/{last}").status_code == 404


def _counts_what_is_large(start: Start) -> None:
    """Events of background responses are most of what is stored."""
    server = start("<|channel|>final<|message|>" + "word " * 300 + "<|return|>", config={"max_bytes": 40_000})
    store = server.endpoint.service.context.store
    assert store
    with server.http() as http:
        first = create(http, input="hi", background=True)["id"]
        soon(lambda: http.get(f"/responses/{first}").json()["status"] == "completed")
        create(http, input="hi")
        soon(lambda: server.call(store.sweep()) == 0 and http.get(f"/responses/{first}").status_code == 404)


def test_a_threshold_compacts_before_answering(start: Start) -> None:
    summary = "<|channel|>final<|message|>They greeted.<|return|>"
    server = start(summary, HELLO)
    items = [
        {"role": "user", "content": "first words"},
        {"role": "assistant", "content": "secret words"},
        {"role": "user", "content": "last words"},
    ]
    with server.http() as http:
        body = {"model": MODEL, "input": items, "context_management": [{"type": "compaction", "compact_threshold": 20}]}
        events = stream(http, body)
        response = events[-1]["response"]
        assert [item["type"] for item in response["output"]] == ["compaction", "reasoning", "message"]
        assert "response.compaction.compacting" in {event["type"] for event in events}
        prompt = server.prompt()
        assert "secret words" not in prompt
        assert prompt.index("They greeted.") < prompt.index("last words")
        create(http, input="and now?", previous_response_id=response["id"])
        prompt = server.prompt()
        assert "secret words" not in prompt
        assert "They greeted." in prompt
        assert "Hello there!" in prompt


def test_a_trigger_only_compacts(start: Start) -> None:
    server = start("<|channel|>final<|message|>They greeted.<|return|>")
    items = [{"role": "user", "content": "hi"}, {"type": "compaction_trigger"}]
    with server.http() as http:
        response = stream(http, {"model": MODEL, "input": items, "store": False})[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["compaction"]
    assert len(server.engine.prompts) == 1


def test_failed_compaction_fails_the_response_and_ends_its_item(start: Start) -> None:
    server = start(HELLO)
    server.engine.fail_after = 1
    items = [{"role": "user", "content": "hi"}, {"type": "compaction_trigger"}]
    with server.http() as http:
        assert stream(http, {"model": MODEL, "input": items})[-1]["type"] == "response.failed"


def test_an_id_that_is_taken_cannot_be_used_again_and_is_its_owners_alone(start: Start) -> None:
    server = start(HELLO)
    mine = {"model": MODEL, "input": "hi", "request_id": "resp_mine"}
    with server.http("alice") as alice, server.http("bob") as bob:
        made = create(alice, **mine)
        error = alice.post("/responses", json=mine).json()["error"]
        assert error["param"] == "request_id"
        assert bob.get("/responses/resp_mine").status_code == 404
        other = create(bob, **mine, metadata={"of": "bob"})
        assert other["id"] == "resp_mine", "bob does not learn that alice has it"
        assert alice.get("/responses/resp_mine").json() == made
        assert bob.get("/responses/resp_mine").json() == other
        assert bob.delete("/responses/resp_mine").json()["deleted"] is True
        assert alice.get("/responses/resp_mine").status_code == 200


@pytest.mark.parametrize("background", [False, True])
def test_of_two_requests_with_one_new_id_one_is_refused(start: Start, background: bool) -> None:
    server = start(HELLO, rate=50.0)
    body = {"model": MODEL, "input": "hi", "request_id": "resp_race", "background": background}
    with server.http() as http, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: http.post("/responses", json=body), range(6)))
    assert sorted(answer.status_code for answer in answers) == [200, 400, 400, 400, 400, 400]
    for answer in answers:
        if answer.status_code == 400:
            assert answer.json()["error"]["message"] == "The id 'resp_race' is taken."


def test_an_item_is_in_a_conversation_once(start: Start) -> None:
    server = start(HELLO)
    item = {"id": "msg_mine", "type": "message", "role": "user", "content": "hi"}
    with server.http() as http:
        twice = http.post("/conversations", json={"items": [item, item]})
        assert twice.json()["error"]["message"].startswith("Duplicate item found with id msg_mine.")
        one = http.post("/conversations", json={"items": [item]}).json()["id"]
        assert http.post(f"/conversations/{one}/items", json={"items": [item]}).status_code == 400
        create(http, input=[item, {"role": "user", "content": "go on"}], conversation=one)
        items = http.get(f"/conversations/{one}/items", params={"order": "asc"}).json()["data"]
    assert [entry["id"] for entry in items].count("msg_mine") == 1
    assert [entry["type"] for entry in items] == ["message", "message", "reasoning", "message"]


async def test_servers_that_start_together_share_one_store(tmp_path: Path) -> None:
    stores = [Store(ResponsesOptions(store=str(tmp_path / "shared.sqlite"))) for _ in range(4)]
    await asyncio.gather(*(store.open() for store in stores))
    keys = await asyncio.gather(*(store.setting("secret", f"made by {n}") for n, store in enumerate(stores)))
    assert len(set(keys)) == 1, "all open what one of them sealed"
    for store in stores:
        await store.aclose()


async def test_a_client_that_goes_away_breaks_no_write(tmp_path: Path) -> None:
    """A write that is broken off may keep SQLite's lock from everybody else; this one is finished instead."""
    store = Store(ResponsesOptions(store=str(tmp_path / "store.sqlite")))
    await store.open()
    names = [f"resp_{number}" for number in range(60)]
    for number, name in enumerate(names):
        body = {"id": name, "status": "completed", "output": []}
        write = asyncio.create_task(store.save(Stored(name, "tenant", body)))
        await asyncio.sleep(0.0003 * number)
        write.cancel()
        with suppress(asyncio.CancelledError):
            await write

    def lock() -> None:
        with sqlite3.connect(tmp_path / "store.sqlite", timeout=10) as other:
            other.execute("BEGIN IMMEDIATE")

    await asyncio.to_thread(lock)
    # Only a write that was cancelled before it began is not there.
    for name in names[1:]:
        async with asyncio.timeout(60):
            while await store.get("tenant", name) is None:
                await asyncio.sleep(0.01)
    await store.aclose()


def test_nothing_of_one_key_is_there_for_another(start: Start) -> None:
    """Every route that takes an id, and every way to go on from one."""
    server = start(LONG, rate=100.0, providers=[fakes.python()])
    with server.http("alice") as alice, server.http("bob") as bob:
        conversation = alice.post("/conversations", json={"items": [{"role": "user", "content": "x"}]}).json()["id"]
        items = f"/conversations/{conversation}/items"
        item = alice.get(items).json()["data"][0]["id"]
        ask = {"model": MODEL, "input": "hi", "max_output_tokens": 5}
        background = alice.post("/responses", json={**ask, "background": True, "max_output_tokens": 300}).json()["id"]
        made = alice.post("/responses", json=ask).json()
        said = made["output"][0]["id"]
        one = f"/responses/{background}"
        routes = [("GET", one), ("GET", f"{one}?stream=true"), ("GET", f"{one}/input_items"), ("POST", f"{one}/cancel")]
        routes += [("DELETE", one), ("GET", items), ("GET", f"{items}/{item}"), ("DELETE", f"{items}/{item}")]
        routes += [("GET", f"/conversations/{conversation}"), ("DELETE", f"/conversations/{conversation}")]
        routes += [("GET", "/containers/cntr_1/files/f/content"), ("GET", f"/responses/{made['id']}")]
        for method, route in routes:
            assert bob.request(method, route).status_code == 404, (method, route)
        assert bob.post(items, json={"items": [{"role": "user", "content": "y"}]}).status_code == 404
        assert bob.post(f"/conversations/{conversation}", json={"metadata": {"a": "b"}}).status_code == 404
        for fields in (
            {"previous_response_id": made["id"]},
            {"conversation": conversation},
            {"input": [{"type": "item_reference", "id": said}]},
        ):
            for body in ({**ask, **fields}, {**ask, **fields, "background": True}):
                assert bob.post("/responses", json=body).status_code in (400, 404), body
            with connect(f"{server.url.replace('http', 'ws')}/v1/responses", additional_headers=BOB) as socket:
                socket.send(json.dumps({"type": "response.create", **ask, **fields}))
                assert json.loads(socket.recv())["type"] == "error"
        assert alice.get(one).json()["status"] in ("queued", "in_progress"), "bob has stopped nothing"
        assert alice.get(f"{items}/{item}").status_code == 200
        alice.post(f"{one}/cancel").raise_for_status()


BOB = {"Authorization": "Bearer bob"}


async def test_what_an_earlier_version_stored_under_a_chosen_id_is_found(tmp_path: Path) -> None:
    """Its key was the id alone, for all tenants together."""
    file = tmp_path / "r.db"
    async with opened(file) as store:
        for tenant, name in (("alice", "mine"), ("bob", "resp_" + "g" * 48)):
            body = {"id": name, "status": "completed", "output": [{"id": f"msg_{name}", "type": "message"}]}
            await store.save(Stored(name, tenant, body, [{"id": f"in_{name}", "type": "message"}]))
    with closing(sqlite3.connect(file)) as db, db:
        for table, column in (("gptoss_responses", "id"), ("gptoss_items", "response")):
            db.execute(f"UPDATE {table} SET {column} = substr({column}, 1, instr({column}, '~') - 1)")
        db.execute("UPDATE gptoss_responses SET input = ?", (json.dumps([{"id": "in_old", "type": "message"}]),))
        db.execute("DELETE FROM gptoss_input_uses")
        db.execute("DELETE FROM gptoss_settings")
    for _ in range(2):
        async with opened(file) as store:
            found = await store.get("alice", "mine")
            assert found is not None
            assert [item["id"] for item in found.input] == ["in_old"]
            assert await store.get("bob", "mine") is None
            assert await store.get("bob", "resp_" + "g" * 48)
            assert "msg_mine" in await store.find_items("alice", ["msg_mine"])
            body = {"id": "mine", "status": "completed", "output": []}
            with pytest.raises(StoreError, match="already"):
                await store.save(Stored("mine", "alice", body))
    async with opened(file) as store:
        assert await store.delete("alice", "mine")
        assert await store.get("alice", "mine") is None


async def test_a_store_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "old.sqlite"
    with closing(sqlite3.connect(file)) as old:
        old.execute("create table gptoss_conversations (id text primary key, tenant text)")
    with pytest.raises(StoreError, match=r"gptoss_conversations is of another version.*old\.sqlite.*GPTOSS_STORE"):
        await Store(ResponsesOptions(store=str(file))).open()


@pytest.mark.parametrize("existed", [False, True])
def test_the_database_is_its_owners_alone(start: Start, tmp_path: Path, existed: bool) -> None:
    file = tmp_path / "kept" / "responses.sqlite"
    if existed:
        file.parent.mkdir()
        with closing(sqlite3.connect(file)) as old:
            old.execute("create table something (x)")
        file.chmod(0o644)
    server = start(HELLO, config={"store": str(file)})
    with server.http() as http:
        create(http, input="hi")
        modes = {part.name: oct(part.stat().st_mode & 0o777) for part in file.parent.iterdir()}
    assert set(modes.values()) == {"0o600"}, modes


async def test_a_closed_store_locks_its_database_for_nobody(tmp_path: Path) -> None:
    """A sweep that was cancelled left its transaction open: 3 of 60 files were locked, some for seconds."""
    for number in range(24):
        file = tmp_path / f"{number}.db"
        async with opened(file) as store:
            await store.save(Stored("resp_" + "a" * 40, "t", {"id": "x", "status": "completed", "output": []}))
            await asyncio.sleep(0.0005 * (number % 12))
        with closing(sqlite3.connect(file, timeout=0)) as db:
            db.execute("BEGIN IMMEDIATE")
