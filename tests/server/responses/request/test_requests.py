"""Every field is honoured or refused by name; nothing is dropped silently."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel

from tests.support.responses.server import MODEL, Running, Start
from tests.support.responses.turns import CALL, HELLO, WEATHER
from vllm_gptoss.server.harmony.messages import Effort
from vllm_gptoss.server.harmony.metrics import UNENFORCED
from vllm_gptoss.server.responses.errors import ApiError
from vllm_gptoss.server.responses.request.create import REFUSED, CreateRequest, parse_create

IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "auto"}]}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"made_up": 1}, "made_up"),
    ({"input": [IMAGE]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0].file_id"),
    *(({"input": [{"role": "user", "content": [{"type": "input_file", "file_data": data}]}]},
       "input[0].content[0].file_data") for data in ("a", "\x80", "/w==")),
    ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "input[0].arguments"),
    ({"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": "", "colour": 1}]}, "input[0].colour"),
    ({"input": 3}, "input"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"metadata": {"k" * 65: "v"}}, "metadata." + "k" * 64),
    ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
    ({"reasoning": {"effort": "heroic"}}, "reasoning.effort"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"shape": "round"}}, "text.shape"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"background": True, "store": False}, "background"),
    ({"previous_response_id": "r", "conversation": "c"}, "previous_response_id"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
    ({"tools": [{"type": "mcp", "server_label": "functions"}]}, "tools[0].server_label"),
    ({"tools": [{"type": "mcp", "server_label": "x", "connector_id": "connector_gmail"}]}, "tools[0].connector_id"),
    ({"tools": [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["f"]}}]},
     "tools[0].container.file_ids"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "nope"}, "tools": [WEATHER]}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "no"}]},
      "tools": [WEATHER]}, "tool_choice.tools[0]"),
    ({"include": ["everything"]}, "include[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[param for _, param in WRONG])
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse_create({"model": MODEL, "input": "hi", **fields})
    assert raised.value.param == param
    assert raised.value.status == 400


def test_every_parameter_of_the_api_is_known() -> None:
    known = set(CreateRequest.model_fields) | set(REFUSED)
    assert set(ResponseCreateParamsBase.__annotations__) - known == set()


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("none", Effort.LOW),
        ("minimal", Effort.LOW),
        ("xhigh", Effort.HIGH),
        ("max", Effort.HIGH),
        (None, Effort.MEDIUM),
    ],
)
def test_efforts_mean_the_nearest_of_three(asked: str | None, meant: Effort) -> None:
    assert parse_create({"input": "hi", "reasoning": {"effort": asked}}).effort is meant


def test_errors_have_the_api_shape_over_http(start: Start) -> None:
    server = start(HELLO)
    with server.http() as http:
        answer = http.post("/responses", json={"model": "other", "input": "hi"})
        assert answer.status_code == 404
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert http.post("/responses", content=b"{").json()["error"]["code"] == "invalid_json"
        assert http.post("/responses", content=b"[" * 100_000).status_code == 413
        assert http.post("/responses", json=[]).status_code == 400
        unknown = [{"type": "function_call_output", "call_id": "c", "output": "x"}]
        error = http.post("/responses", json={"input": unknown}).json()["error"]
        assert error["param"] == "input[0].call_id"
        dangling = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
        assert http.post("/responses", json={"input": dangling}).json()["error"]["code"] == "missing_tool_output"
        tool = {"input": "x", "tools": [{"type": "web_search"}]}
        assert http.post("/responses", json=tool).json()["error"]["param"] == "tools[0]"


class City(BaseModel):
    city: str


def test_parsed_items_of_openai_python_can_be_sent_back(start: Start) -> None:
    """`model_dump` keeps what `responses.parse` added to an item."""
    server = start(CALL, '<|channel|>final<|message|>{"city":"Rome"}<|return|>')
    given: list[Any] = [{"role": "user", "content": "hi"}]
    tool: Any = {**WEATHER, "strict": True, "parameters": {**WEATHER["parameters"], "additionalProperties": False}}
    parse = partial(server.client().responses.parse, model=MODEL, input=given, tools=[tool], text_format=City)
    call = parse().output[-1].model_dump()
    assert call["parsed_arguments"] == {"city": "Rome"}
    given += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}]
    message = parse().output[-1].model_dump()
    assert message["content"][0]["parsed"] == {"city": "Rome"}
    given += [message, {"role": "user", "content": "And now?"}]
    assert parse().output_parsed == City(city="Rome")


def test_a_text_file_is_read(start: Start) -> None:
    server = start(HELLO)
    part = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGVsbG8gZmlsZQ=="}
    with server.http() as http:
        http.post("/responses", json={"input": [{"role": "user", "content": [part]}]}).raise_for_status()
    assert "hello file" in server.prompt()


def test_namespaces_are_offered_and_named_in_calls(start: Start) -> None:
    from tests.support.responses.events import stream

    server = start(' to=mail.send<|channel|>commentary json<|message|>{"to":"x"}<|call|>')
    inner = {
        "type": "function",
        "name": "send",
        "parameters": {"type": "object", "properties": {"to": {"type": "string"}}},
    }
    tool = {"type": "namespace", "name": "mail", "description": "Mail.", "tools": [inner]}
    with server.http() as http:
        item = stream(http, {"model": MODEL, "input": "?", "tools": [tool]})[-1]["response"]["output"][-1]
    assert (item["namespace"], item["name"]) == ("mail", "send")
    assert "namespace mail {" in server.prompt()


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ("auto", False),
        ("required", True),
        ({"type": "function", "name": "get_weather"}, True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}, False),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}, True),
    ],
)
def test_tool_choice_reaches_the_engine(start: Start, choice: Any, forced: bool) -> None:
    server = start(HELLO)
    other = {"type": "function", "name": "other", "parameters": {"type": "object", "properties": {}}}
    with server.http() as http:
        body = {"input": "?", "tools": [WEATHER, other], "tool_choice": choice}
        http.post("/responses", json=body).raise_for_status()
    tag = server.engine.samplings[-1].structural_tag or ""
    assert ("final" in tag) is not forced, "an answer is possible only where no call is forced"
    assert ("functions.other" in tag) is isinstance(choice, str)


def test_a_schema_is_shown_and_enforced(start: Start) -> None:
    server = start('<|channel|>final <|constrain|>json<|message|>{"a":1}<|return|>')
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    with server.http() as http:
        body = http.post("/responses", json={"input": "?", "text": {"format": form}}).raise_for_status().json()
    assert body["output"][-1]["content"][0]["text"] == '{"a":1}'
    assert "# Response Formats" in server.prompt()
    assert "::= integer" in (server.engine.samplings[-1].structural_tag or "")


def tag_of(server: Running, **fields: Any) -> str:
    with server.http() as http:
        http.post("/responses", json={"input": "?", **fields}).raise_for_status()
    return server.engine.samplings[-1].structural_tag or ""


DEEP = {"type": "object", "properties": {"p": {"type": "string", "pattern": "(" * 30_000 + ")" * 30_000}}}


@pytest.mark.parametrize("schema", [DEEP, {"type": "object", "properties": {"p": {"pattern": r"^\p{L}$"}}}])
def test_what_cannot_be_enforced_harms_nobody_but_is_told_to_who_asks_for_it(start: Start, schema: Any) -> None:
    """30,000 brackets end the process of xgrammar's own converter."""
    server = start(HELLO)
    tool = {"type": "function", "name": "f", "parameters": schema}
    before = _unenforced()
    for strict, counted in ((False, 0), (None, 1)):
        assert "to=functions.f" in tag_of(server, tools=[{**tool, "strict": strict}])
        assert _unenforced() - before == counted
    form = {"type": "json_schema", "name": "a", "schema": schema}
    assert "root ::= object" in tag_of(server, text={"format": form})
    with server.http() as http:
        refused = http.post("/responses", json={"input": "?", "tools": [WEATHER, {**tool, "strict": True}]})
        answer = http.post("/responses", json={"input": "?", "text": {"format": {**form, "strict": True}}})
    assert (refused.status_code, answer.status_code) == (400, 400)
    error = refused.json()["error"]
    assert error["param"] == "tools"
    assert "'f'" in error["message"]
    assert "'pattern'" in error["message"]
    assert answer.json()["error"]["param"] == "text.format.schema"


def _unenforced() -> float:
    return sum(s.value for m in UNENFORCED.collect() for s in m.samples if s.name.endswith("_total"))


def test_one_tool_that_cannot_be_enforced_leaves_the_others_held(start: Start) -> None:
    tag = tag_of(start(HELLO), tools=[{"type": "function", "name": "f", "parameters": DEEP}, WEATHER])
    assert "to=functions.f" in tag
    assert "city" in tag


def test_tools_that_are_not_strict_take_any_object(start: Start) -> None:
    tag = tag_of(start(HELLO), tools=[{**WEATHER, "strict": False}])
    assert "city" not in tag


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [
        ("regex", "(" * 30_000 + ")" * 30_000),
        ("regex", "(a|b)*a(a|b){12}"),
        ("regex", r"\bword"),
        ("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
        ("lark", "start: /[a-z ]/~1..600"),
    ],
    ids=["deep", "wide", "boundary", "lark", "counted"],
)
def test_a_hostile_grammar_of_a_custom_tool_is_refused(start: Start, syntax: str, definition: str) -> None:
    server = start(HELLO)
    tool = {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    with server.http() as http:
        refused = http.post("/responses", json={"input": "?", "tools": [tool]})
        assert refused.status_code == 400
        assert "'c'" in refused.json()["error"]["message"]


def test_an_agent_that_always_offers_search_is_served_without_one(start: Start) -> None:
    """Codex sends `web_search` with every request; other clients get an error where there is no browser."""
    server = start(HELLO)
    body = {"input": "x", "tools": [{"type": "web_search", "external_web_access": True}]}
    with server.http() as http:
        answer = http.post("/responses", json=body, headers={"originator": "codex_exec"}).raise_for_status().json()
        assert answer["tools"] == [], "the response has the offered tools only"
        assert http.post("/responses", json=body).status_code == 400


PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Delete File: " filename LF
filename: /(.+)/
%import common.LF
"""


def test_a_lark_grammar_constrains_a_custom_tool(start: Start) -> None:
    """The form in which Codex gives its `apply_patch`; upstream refuses grammars for every model."""
    import xgrammar

    from tests.support.responses.events import stream

    text = "*** Begin Patch\n*** Delete File: a\n*** End Patch"
    server = start(f" to=functions.apply_patch<|channel|>commentary<|message|>{text}<|call|>")
    tool = {"type": "custom", "name": "apply_patch", "description": "Patches."}
    tool["format"] = {"type": "grammar", "syntax": "lark", "definition": PATCH}  # type: ignore[assignment]
    with server.http() as http:
        item = stream(http, {"model": MODEL, "input": "?", "tools": [tool]})[-1]["response"]["output"][0]
        assert item["input"] == text
        tool["format"] = {"type": "grammar", "syntax": "lark", "definition": "start: ("}  # type: ignore[assignment]
        error = http.post("/responses", json={"input": "?", "tools": [tool]}).json()["error"]
        assert error["param"] == "tools"
    tag = server.engine.samplings[-1].structural_tag
    assert tag is not None
    assert "*** Begin Patch" in str(xgrammar.Grammar.from_structural_tag(tag))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "name": f"f{n}", "parameters": {}} for n in range(5000)]}, "tools"),
        (
            {
                "tools": [
                    {"type": "function", "name": "f", "parameters": {"properties": {"a": {"enum": ["x"] * 100_000}}}}
                ]
            },
            "tools[0].parameters",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"enum": ["x"] * 100_000}}}},
            "text.format.schema",
        ),
    ],
    ids=["tools", "enum", "answer"],
)
def test_what_cannot_be_shown_or_compiled_is_refused_at_once(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_create({"model": MODEL, "input": "hi", **fields})
    assert refused.value.param == param
