"""The arguments and the renderer of a gpt-oss server that the part for chat completions changes, and the others."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.testclient import TestClient

from tests.server.chat.arguments import arguments, attached_around
from vllm_gptoss.server.chat.endpoint import ChatCompletions
from vllm_gptoss.server.harmony.tokens import encoding
from vllm_gptoss.settings import Settings

pytestmark = pytest.mark.vllm


def attached(settings: Settings, args: Namespace) -> Namespace:
    ChatCompletions().attach(FastAPI(), args, settings)
    return args


def test_missing_flags_are_filled_in() -> None:
    args = attached(Settings(), arguments())
    assert (args.enable_auto_tool_choice, args.tool_call_parser) == (True, "openai")
    assert args.structured_outputs_config.reasoning_parser == "openai_gptoss"
    assert args.tool_strict_level == "function"
    assert attached(Settings(), arguments(tool_strict_level=None)).tool_strict_level == "function"  # 0.33's default


def test_what_the_user_set_stays() -> None:
    assert attached(Settings(), arguments(tool_strict_level="parameter")).tool_strict_level == "parameter"
    assert attached(Settings(strict_tools=False), arguments()).tool_strict_level == "auto"
    args = attached(Settings(parser=False), arguments())
    assert (args.enable_auto_tool_choice, args.tool_call_parser, args.tool_strict_level) == (False, None, "auto")


def test_a_backend_without_token_formats_is_not_asked_for_them(caplog: pytest.LogCaptureFixture) -> None:
    assert attached(Settings(), arguments("guidance")).tool_strict_level == "auto"
    assert "guidance" in caplog.text


def make_request(**fields: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hi"}], **fields)


class Renderer:
    """vLLM's step. It returns no prompt, so a test that renders one fails here."""

    def __init__(self, *prompt: Any) -> None:
        self.prompt = prompt
        self.reasoning_effort_map = {"xhigh": "low"}
        self.model_config = SimpleNamespace(max_model_len=16_384)

    def _make_request_with_harmony(self, request: Any, should_include_tools: bool = True) -> Any:
        assert self.prompt, "vLLM's own prompt was rendered"
        return [], list(self.prompt)


def started_renderer(*prompt: Any, **settings: Any) -> Any:
    """The renderer of every handler of a started server; prompt: that of vLLM's renderer."""
    renderer = Renderer(*prompt)
    handlers = {name: Handler(renderer) for name in ("openai_serving_chat", "serving_render")}
    state = SimpleNamespace(online_renderer=renderer, **handlers)
    part = ChatCompletions()
    part.attach(FastAPI(), arguments(), Settings(**settings))
    asyncio.run(part.start(None, state, Namespace()))
    assert all(getattr(state, name).online_renderer is state.online_renderer for name in handlers)
    return state.online_renderer


class Handler:
    def __init__(self, renderer: Renderer) -> None:
        self.online_renderer = renderer


def prompt_of(renderer: Any, request: Any) -> str:
    _, (engine_input,) = renderer._make_request_with_harmony(request, True)
    return str(encoding().decode(engine_input["prompt_token_ids"]))


def test_the_renderer_shows_our_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SYSTEM_START_DATE", "2025-06-28")
    renderer = started_renderer()
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    parameters = {"type": "object", "properties": {"city": optional}}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}
    prompt = prompt_of(renderer, make_request(tools=[tool], reasoning_effort="high"))
    assert "city?: string | null," in prompt
    assert "Current date: 2025-06-28" in prompt
    assert "Reasoning: high" in prompt
    assert prompt.endswith("<|start|>user<|message|>hi<|end|><|start|>assistant")
    assert "Reasoning: low" in prompt_of(renderer, make_request(reasoning_effort="xhigh"))  # --reasoning-effort-map


def test_a_prompt_must_leave_room_for_one_token() -> None:
    from vllm.exceptions import VLLMValidationError

    renderer = started_renderer()
    tokens = len(renderer._make_request_with_harmony(make_request(), True)[1][0]["prompt_token_ids"])
    renderer.model_config.max_model_len = tokens + 1
    prompt_of(renderer, make_request())
    renderer.model_config.max_model_len = tokens
    with pytest.raises(VLLMValidationError, match=f"However, your messages resulted in {tokens} tokens"):
        prompt_of(renderer, make_request())


@pytest.mark.parametrize("name", ["get weather", "a\nb", "", "x" * 300, "a<|message|>b", "a\u200bb"], ids=repr)
def test_a_name_that_no_call_could_have_is_refused(name: str) -> None:
    """A call of it would be lost: the parser reads a name up to the next blank."""
    from vllm.exceptions import VLLMValidationError

    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", name)]
    renderer = started_renderer()
    with pytest.raises(VLLMValidationError, match="cannot be called") as refused:
        prompt_of(renderer, make_request(tools=tools))
    assert refused.value.parameter == "tools[1].function.name"
    prompt_of(renderer, make_request(tools=[{"type": "function", "function": {"name": "größe.x/y-1"}}]))


def test_prefilled_prompts_of_disaggregated_serving_stay_upstreams() -> None:
    renderer = started_renderer("upstream's")
    request = make_request(kv_transfer_params={"prompt_token_ids": [1, 2]})
    assert renderer._make_request_with_harmony(request, True) == ([], ["upstream's"])


def test_a_user_who_wants_vllms_form_of_instructions_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS", "1")
    assert type(started_renderer()) is Renderer


def test_without_our_parser_the_prompt_is_vllms_too() -> None:
    assert type(started_renderer(parser=False)) is Renderer


WEATHER, TIME = ({"type": "function", "function": {"name": name}} for name in ("get_weather", "get_time"))


def allowed(mode: Any = "auto", *tools: Any) -> dict[str, Any]:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}
    return {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, TIME], "tool_choice": choice}


@pytest.fixture
def chat_app() -> TestClient:
    """A route that shows the request it was given."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create(request: ChatCompletionRequest, raw_request: Request) -> dict[str, Any]:
        assert isinstance(raw_request, Request)
        names = [tool.function.name for tool in request.tools or ()]
        return {"tools": names, "choice": request.model_dump()["tool_choice"]}

    return TestClient(attached_around(router))


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_leave_those_tools_and_their_mode(chat_app: TestClient, mode: str) -> None:
    answer = chat_app.post("/v1/chat/completions", json=allowed(mode, TIME))
    assert answer.json() == {"tools": ["get_time"], "choice": mode}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (allowed("sometimes", TIME), "mode"),
        (allowed("auto"), "tools"),
        (allowed("auto", {"type": "function", "function": {"name": "rm"}}), "tools"),
        (allowed("auto", {"type": "function", "name": "get_time"}), "tools"),
        (allowed("auto", 3), "tools"),
        ({**allowed("auto", TIME), "tools": None}, "tools"),
        ({**allowed("auto", TIME), "tools": "x"}, "tools"),
    ],
)
def test_wrong_allowed_tools_are_refused_by_name(chat_app: TestClient, body: Any, param: str) -> None:
    answer = chat_app.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["param"] == f"tool_choice.allowed_tools.{param}"


def test_other_choices_and_bodies_are_as_before(chat_app: TestClient) -> None:
    body = allowed()
    assert (
        chat_app.post("/v1/chat/completions", json={**body, "tool_choice": "required"}).json()["choice"] == "required"
    )
    named = {"type": "function", "function": {"name": "get_time"}}
    assert chat_app.post("/v1/chat/completions", json={**body, "tool_choice": named}).json()["choice"] == named
    assert chat_app.post("/v1/chat/completions", json=[]).status_code == 422
