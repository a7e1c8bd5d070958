"""Odd but legal JSON, and JSON that is not: a checked response or a 4xx that names the field, never a 5xx."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.support.responses import fakes
from tests.support.responses.events import EVENT_TYPES, check, check_response, check_stream, stream
from tests.support.responses.postgres import ALSO_POSTGRES
from tests.support.responses.replay import ReplayEngine
from tests.support.responses.server import MODEL, Running, Script, Start, create, running
from tests.support.responses.turns import CALL, HELLO, SEARCH, WEATHER
from tests.support.waiting import soon
from vllm_gptoss.server.responses.errors import ApiError
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.run.engine import Chunk
from vllm_gptoss.tools.confined import Sizes

HALF = "\ud83d"  # what JavaScript sends of an emoji that was cut in two


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    store = tmp_path_factory.mktemp("hostile") / "store.sqlite"
    with running(ReplayEngine(Script(HELLO)), ResponsesOptions(store=str(store)), [fakes.mcp()]) as server:
        yield server


def answer(server: Running, body: dict[str, Any] | str) -> httpx.Response:
    """The answer. Its status must be the same with streaming; a response must be complete and stored."""
    text = body if isinstance(body, str) else json.dumps({"model": MODEL, "input": "hi", **body})
    with server.http() as http:
        plain = http.post("/responses", content=text)
        streamed = http.post("/responses", content=text.rstrip()[:-1] + ', "stream": true}')
        assert streamed.status_code == plain.status_code
        if plain.status_code == 200:
            check_response(plain.json())
            events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
            check_stream(events)
            last = events[-1]["response"]
            assert http.get(f"/responses/{last['id']}").json() == last
            assert http.get(f"/responses/{last['id']}/input_items").status_code == 200
    return plain


def function(**parameters: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object", **parameters}}]}


HALVES: dict[str, dict[str, Any]] = {
    "instructions": {"instructions": HALF},
    "metadata": {"metadata": {HALF: HALF}},
    "user": {"user": HALF},
    "input": {"input": f"a{HALF}b"},
    "id": {"input": [{"role": "user", "content": "hi", "id": HALF}]},
    "schema": function(properties={HALF: {"enum": [HALF], "description": HALF}}),
    "format": {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"title": HALF}}}},
    "place": {"tools": [{"type": "web_search", "user_location": {"type": "approximate", "city": HALF}}]},
}


@pytest.mark.parametrize("name", HALVES)
def test_half_a_character_is_no_reason_to_fail(server: Running, name: str) -> None:
    got = answer(server, HALVES[name])
    assert got.status_code == (400 if name == "place" else 200), got.text  # there is no browser here


NOT_FOUND = ({"previous_response_id": HALF}, {"conversation": HALF}, {"model": HALF}, {"include": [HALF]})


@pytest.mark.parametrize("fields", NOT_FOUND, ids=lambda fields: next(iter(fields)))
def test_half_a_character_names_nothing(server: Running, fields: dict[str, Any]) -> None:
    assert answer(server, fields).status_code in (400, 404)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400"])
def test_what_is_no_number_is_refused(server: Running, number: str) -> None:
    body = json.dumps({"model": MODEL, "input": "hi", **function(properties={"a": {"maximum": 7}})})
    got = answer(server, body.replace("7", number))
    assert (got.status_code, got.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(("levels", "status"), [(50, 200), (400, 413)])
def test_deep_schemas_are_read_or_refused(server: Running, levels: int, status: int) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    assert answer(server, function(properties={"a": schema})).status_code == status
    form = {"type": "json_schema", "name": "x", "schema": schema}
    assert answer(server, {"text": {"format": form}}).status_code == status


NO_SCHEMAS: list[dict[str, Any]] = [
    {"properties": "x"},
    {"properties": {"a": {"$ref": "#/definitions/none"}}},
    {"properties": {"a": {"$ref": 3}}},
    {"properties": {"a": {"$ref": "#"}}},
    {"properties": {"a": {"type": ["string", 3]}}},
    {"properties": {"a": {"enum": "x", "anyOf": 3, "description": 3, "default": {"x": []}}}},
    {"properties": {"a": [], "b": True}, "required": "a"},
]


@pytest.mark.parametrize("schema", NO_SCHEMAS, ids=str)
def test_what_is_hardly_a_schema_is_shown_as_well_as_can_be(server: Running, schema: dict[str, Any]) -> None:
    assert answer(server, function(**schema)).status_code in (200, 400)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"²": 1}}, "logit_bias.²"),
        ({"logit_bias": {"99999999999999999999": 1}}, "logit_bias.99999999999999999999"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids[0]"),
        ({"stop": ""}, "stop"),
        ({"top_k": 2**63}, "top_k"),
        ({"min_tokens": 10**30}, "min_tokens"),
        ({"input": [{"type": "compaction_trigger"}]}, "input"),
        ({"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": 3}]}]},
         "input[0].content[0].annotations"),
    ],
)  # fmt: skip
def test_what_cannot_be_names_its_field(server: Running, fields: dict[str, Any], param: str) -> None:
    got = answer(server, fields)
    assert (got.status_code, got.json()["error"]["param"]) == (400, param)


def test_a_field_that_is_null_is_as_if_it_were_not_there(server: Running) -> None:
    names = [
        "instructions",
        "metadata",
        "reasoning",
        "text",
        "tools",
        "tool_choice",
        "stream_options",
        "include",
        "store",
    ]
    names += ["user", "truncation", "background", "service_tier", "max_output_tokens", "temperature", "top_p", "prompt"]
    names += ["previous_response_id", "conversation", "parallel_tool_calls", "prompt_cache_key", "stop", "top_logprobs"]
    assert answer(server, dict.fromkeys(names)).status_code == 200


def test_an_answer_with_citations_can_be_sent_back(start: Start) -> None:
    cited = "<|channel|>final<|message|>Cats purr【0†L1-L2】.<|return|>"
    server = start(SEARCH, cited, HELLO, providers=[fakes.browser()])
    body = {"model": MODEL, "input": "?", "tools": [{"type": "web_search"}]}
    with server.http() as http:
        first = stream(http, body)[-1]["response"]
        assert first["output"][-1]["content"][0]["annotations"][0]["lines"] == [1, 2]
        history = [{"role": "user", "content": "?"}, *first["output"], {"role": "user", "content": "more"}]
        assert stream(http, {**body, "input": history, "store": False})[-1]["type"] == "response.completed"
        conversation = http.post("/conversations", json={"items": first["output"]}).raise_for_status().json()["id"]
        assert stream(http, {**body, "input": "more", "conversation": conversation})[-1]["type"] == "response.completed"


def test_what_only_the_engine_can_refuse_is_the_clients_error(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is a grammar, which vLLM compiles when the request reaches the engine."""
    server = start(HELLO)

    async def refuse(*_: Any) -> Any:
        raise ApiError("The grammar has no root.", param="structured_outputs")
        yield Chunk([])

    monkeypatch.setattr(server.engine, "generate", refuse)
    with server.http() as http:
        refused = http.post("/responses", json={"model": MODEL, "input": "hi"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "The grammar has no root.")
        last = stream(http, {"model": MODEL, "input": "hi"})[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["error"] == {"code": "invalid_prompt", "message": "The grammar has no root."}


def test_a_stream_that_loses_its_response_says_so(start: Start) -> None:
    from httpx_sse import connect_sse

    server = start(CALL, rate=5.0)
    body = {"model": MODEL, "input": "hi", "background": True, "tools": [WEATHER]}
    with server.http() as http, server.http() as other:
        made = http.post("/responses", json=body).json()["id"]
        with connect_sse(http, "GET", f"/responses/{made}?stream=true") as source:
            told = source.iter_sse()
            next(told)
            other.delete(f"/responses/{made}").raise_for_status()
            *_, last, done = told
    event = last.json()
    assert done.data == "[DONE]"
    assert event["type"] in ("error", "response.incomplete")
    check(EVENT_TYPES[event["type"]], event)


def test_a_websocket_survives_what_it_does_not_understand(server: Running) -> None:
    from websockets.sync.client import connect

    with connect(f"{server.url.replace('http', 'ws')}/v1/responses") as socket:
        for message in ("{", "[]", '{"type": 3}', '{"type": "response.create", "input": 1e999}', f'"{"[" * 9}"'):
            socket.send(message)
            assert json.loads(socket.recv())["type"] == "error"
        for stream_id in ("s" * 129, 3, {}):  # the first would be in every event, one per token
            socket.send(json.dumps({"type": "response.create", "model": MODEL, "input": "hi", "stream_id": stream_id}))
            event = json.loads(socket.recv())
            assert (event["type"], event["error"]["param"]) == ("error", "stream_id")
        socket.send(json.dumps({"type": "response.create", "model": MODEL, "input": f"hi {HALF}"}))
        while (event := json.loads(socket.recv()))["type"] != "response.completed":
            assert event["type"] != "error"


NUL, TOO_LONG = "a\0b", "i" * 129


@ALSO_POSTGRES
def test_what_can_be_no_id_is_told_before_the_store_is_asked(start: Start) -> None:
    """PostgreSQL takes no NUL and no id over its column: 500 and 503 with its words in them."""
    server = start(HELLO)
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    with server.http() as http:
        for wrong in (NUL, TOO_LONG, 5):
            for item in ({"role": "user", "content": "hi"}, call, {"type": "item_reference"}):
                refused = http.post("/responses", json={"model": MODEL, "input": [{**item, "id": wrong}]})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].id")
            items = [{"type": "message", "role": "user", "content": "hi", "id": wrong}]
            assert http.post("/conversations", json={"items": items}).status_code == 400
        for wrong in (NUL, TOO_LONG):
            names: list[tuple[dict[str, Any], int]] = [({"previous_response_id": wrong}, 400)]
            names += [({"conversation": wrong}, 404), ({"conversation": {"id": wrong}}, 404)]
            for field, status in names:
                refused = http.post("/responses", json={"model": MODEL, "input": "hi", **field})
                assert (refused.status_code, refused.json()["error"]["param"]) == (status, next(iter(field)))
            for path in ("responses/{}", "responses/{}/input_items", "conversations/{}/items", "containers/{}/files"):
                assert http.get("/" + path.format(quote(wrong))).status_code == 404
            tool = {"type": "code_interpreter", "container": wrong}
            refused = http.post("/responses", json={"model": MODEL, "input": "hi", "tools": [tool]})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0].container")
            ran = {"type": "code_interpreter_call", "id": "ci", "code": "1", "container_id": wrong}
            assert create(http, input=[{**ran, "status": "completed", "outputs": None}])["status"] == "completed"
        kept = create(http, input=[{"role": "user", "content": "hi", "id": "i" * 128}])
        assert http.get(f"/responses/{kept['id']}/input_items").json()["data"][0]["id"] == "i" * 128
        assert create(http, input=[{"role": "user", "content": "hi", "id": ""}])["status"] == "completed"


@ALSO_POSTGRES
@pytest.mark.parametrize("after", [2**31, 10**30, -(10**30)])
def test_a_stream_can_be_asked_for_from_any_number(start: Start, after: int) -> None:
    server = start(HELLO)
    with server.http() as http:
        identifier = create(http, input="hi", background=True)["id"]
        soon(lambda: http.get(f"/responses/{identifier}").json()["status"] == "completed")
        told = http.get(f"/responses/{identifier}", params={"stream": True, "starting_after": after}).text
    assert told.endswith("data: [DONE]\n\n")
    assert ("response.created" in told) is (after < 0)
    assert "error" not in re.findall(r"^event: (.*)$", told, re.MULTILINE)


def test_a_full_queue_of_workers_is_no_fault_of_the_schema(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm_gptoss.tools.confined.pool"], "_sizes", Sizes(1, queue=1))
    server = start(HELLO)

    def ask(number: int) -> httpx.Response:
        schema = {"type": "object", "properties": {f"p{number}": {"type": "string", "pattern": "^[a-z]{1,99}$"}}}
        form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
        with server.http() as http:
            return http.post("/responses", json={"model": MODEL, "input": "hi", "text": {"format": form}})

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(ask, range(16)))
    assert {answer.status_code for answer in answers} == {200, 503}
    for busy in (answer for answer in answers if answer.status_code == 503):
        assert busy.headers["retry-after"] == "5"
        assert "jobs of all callers are waiting" in busy.json()["error"]["message"]


@pytest.mark.parametrize("stop", [["a", "b", "c", "d", "e"], "x" * 1025, ["a", ""]])
def test_stop_strings_have_a_limit(server: Running, stop: Any) -> None:
    """They are looked for in every piece of an answer: 100,000 of them held the event loop."""
    got = answer(server, {"stop": stop})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "stop")
