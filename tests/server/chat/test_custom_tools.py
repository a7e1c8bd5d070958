"""Custom tools of chat completions: in the prompt, in the answer, in the history, and refused by name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Request
from fastapi.testclient import TestClient
from openai.types.chat import ChatCompletion

from demo.server import NAME, Server
from tests.server.chat.arguments import attached_around
from tests.support.harmony_streams import tokens
from vllm_gptoss.server.harmony.tokens import encoding

pytestmark = pytest.mark.vllm

PATCH = '*** Begin Patch\n+ "quoted" \\ 👩‍🚀\n*** End Patch'
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def custom(name: Any = "patch", **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, **fields}}


def grammar(syntax: Any, definition: Any) -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


REGEX = custom(format=grammar("regex", r"\*\*\* Begin[\s\S]*"))
LARK = custom(format=grammar("lark", 'start: "SELECT " /[a-z]+/'))


def asked(server: Server, said: str, tool: Any, stream: bool, **fields: Any) -> tuple[list[Any], str]:
    """The calls and the finish reason of a model that generates `said`."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "?"}],
        "tools": [FUNCTION, tool],
        "vllm_xargs": {"forced": " ".join(map(str, tokens(said)))},
        "max_completion_tokens": len(tokens(said)),
        "stream": stream,
        **fields,
    }
    response = httpx.post(f"{server.api}/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    if not stream:
        ChatCompletion.model_validate(response.json())
        choice = response.json()["choices"][0]
        return choice["message"]["tool_calls"], choice["finish_reason"]
    calls: dict[int, Any] = {}
    finish = ""
    for line in response.text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            finish = choice["finish_reason"] or finish
            for call in choice["delta"].get("tool_calls") or ():
                part, at = call.pop("custom"), call.pop("index")
                made = calls.setdefault(at, {**call, "custom": {"name": part.get("name"), "input": ""}})
                made["custom"]["input"] += part["input"]
    return list(calls.values()), finish


def to(text: str, end: str = "<|call|>") -> str:
    return f"<|channel|>commentary to=functions.patch<|message|>{text}{end}"


@pytest.mark.serve
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tool", "said", "given"),
    [
        (custom(), json.dumps({"input": PATCH}), PATCH),
        (custom(), json.dumps({"input": PATCH}, ensure_ascii=False), PATCH),
        (custom(), "no JSON", "no JSON"),
        (REGEX, PATCH, PATCH),
        (LARK, "SELECT name", "SELECT name"),
    ],
)
def test_the_input_is_the_text_alone(forced: Server, tool: Any, said: str, given: str, stream: bool) -> None:
    (call,), finish = asked(forced, to(said), tool, stream)
    assert call.pop("id").startswith("chatcmpl-tool-")
    assert call == {"type": "custom", "custom": {"name": "patch", "input": given}}
    assert finish == "tool_calls"


@pytest.mark.serve
@pytest.mark.parametrize("stream", [False, True])
def test_functions_beside_custom_tools_stay_functions(forced: Server, stream: bool) -> None:
    both = to('{"input": "x"}', "<|end|><|start|>assistant") + to("{}").replace("patch", "f")
    body = {"model": NAME, "messages": [{"role": "user", "content": "?"}], "tools": [FUNCTION, custom()]}
    forced_ids = {"forced": " ".join(map(str, tokens(both)))}
    answer = httpx.post(
        f"{forced.api}/chat/completions", json={**body, "vllm_xargs": forced_ids, "stream": stream}, timeout=120
    )
    assert '"function":{' in answer.text.replace(" ", "")
    assert '"custom":{' in answer.text.replace(" ", "")


@pytest.mark.serve
def test_a_cut_input_ends_where_the_model_was_cut(forced: Server) -> None:
    said = to('{"input": "one two \\u00', "")
    for stream in (False, True):
        (call,), _ = asked(forced, said, custom(), stream)
        assert call["custom"]["input"] == "one two "


@pytest.mark.serve
def test_a_choice_and_a_grammar_are_kept_whatever_the_model_wants(served: Server) -> None:
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [FUNCTION, custom("sql", format=grammar("regex", "SELECT [a-c]{2};"))],
        "tool_choice": custom("sql"),
        "max_completion_tokens": 300,
    }
    answer = httpx.post(f"{served.api}/chat/completions", json=body, timeout=120)
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["custom"]["name"] == "sql"
    assert call["custom"]["input"] in {f"SELECT {a}{b};" for a in "abc" for b in "abc"}


@pytest.fixture
def app() -> TestClient:
    """A route that shows the prompt of the request it was given."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    from vllm_gptoss.server.chat.chat_request import conversation_of
    from vllm_gptoss.server.harmony.prompt import render

    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create(request: ChatCompletionRequest, raw_request: Request) -> dict[str, Any]:
        del raw_request
        return {"prompt": encoding().decode(render(conversation_of(None, request, True, None)))}

    return TestClient(attached_around(router))


def post(app: TestClient, tools: Any, **fields: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": tools, **fields}
    return app.post("/v1/chat/completions", json=body)


def test_the_prompt_shows_one_string_or_the_grammar(app: TestClient) -> None:
    shown = post(app, [custom(description="Applies a patch.")]).json()["prompt"]
    assert "// Applies a patch.\ntype patch = (_: {\ninput: string,\n}) => any;" in shown
    shown = post(app, [LARK]).json()["prompt"]
    assert '// start: "SELECT " /[a-z]+/\ntype patch = () => any;' in shown


@pytest.mark.parametrize(
    ("tool", "header", "text"),
    [(custom(), " json<|message|>", '{"input":"a \\"b\\""}'), (REGEX, "<|message|>", 'a "b"')],
)
def test_history_shows_the_call_as_the_model_wrote_it(app: TestClient, tool: Any, header: str, text: str) -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": 'a "b"'}}
    talk = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    shown = post(app, [tool], messages=talk).json()["prompt"].replace('"input": ', '"input":')
    assert f"to=functions.patch<|channel|>commentary{header}{text}<|call|>" in shown
    assert "<|start|>functions.patch to=assistant<|channel|>commentary<|message|>done<|end|>" in shown


def test_allowed_tools_may_name_a_custom_tool(app: TestClient) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [custom()]}}
    shown = post(app, [FUNCTION, custom()], tool_choice=choice).json()["prompt"]
    assert "type patch" in shown
    assert "type f" not in shown


@pytest.mark.parametrize(
    ("tools", "fields", "param"),
    [
        ([{"type": "custom"}], {}, "tools[0].custom.name"),
        ([FUNCTION, custom("a b")], {}, "tools[1].custom.name"),
        ([custom(3)], {}, "tools[0].custom.name"),
        ([custom(description=3)], {}, "tools[0].custom.description"),
        ([custom(format={"type": "json"})], {}, "tools[0].custom.format"),
        ([custom(format=grammar("ebnf", "x"))], {}, "tools[0].custom.format"),
        ([custom(format={"type": "grammar", "syntax": "regex", "definition": "x"})], {}, "tools[0].custom.format"),
        ([custom(format=grammar("regex", "("))], {}, "tools"),
        ([custom(format=grammar("lark", 'start: "a"~1..101'))], {}, "tools"),
        ([custom(format=grammar("lark", "(" * 101))], {}, "tools"),
        ([FUNCTION, custom("f")], {}, "tools"),
        ([custom(), custom()], {}, "tools"),
        ([FUNCTION], {"tool_choice": custom("f")}, "tool_choice"),
        ([custom()], {"tool_choice": {"type": "custom"}}, "tool_choice"),
        (3, {"tool_choice": custom()}, "tool_choice"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(app: TestClient, tools: Any, fields: Any, param: str) -> None:
    answer = post(app, tools, **fields)
    assert (answer.status_code, answer.json()["param"]) == (400, param), answer.text


def test_a_client_cannot_name_our_own_field(app: TestClient) -> None:
    function = {"name": "f", "gptoss_custom": {"grammar": None, "written": None}}
    assert "type f = () => any;" in post(app, [{"type": "function", "function": function}, custom()]).json()["prompt"]
