"""Long prompts are rendered outside the event loop, and equal the prompts that vLLM's rendering step expects."""

from __future__ import annotations

import asyncio
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, HTTPException, Request

from tests.server.chat.arguments import arguments, attached_around
from vllm_gptoss.server.chat import early
from vllm_gptoss.server.chat.chat_request import render_chat_early
from vllm_gptoss.server.chat.early import QUICK, WAITING, in_renderer, settle
from vllm_gptoss.server.chat.endpoint import ChatCompletions
from vllm_gptoss.server.chat.messages_route import _render_early
from vllm_gptoss.server.chat.vllm_constraint import constrain
from vllm_gptoss.server.harmony.prompt import render
from vllm_gptoss.server.harmony.tokens import encode
from vllm_gptoss.server.http import bodies, callers
from vllm_gptoss.settings import Settings
from vllm_gptoss.tools.confined import BusyError
from vllm_gptoss.tools.protocol import CALLER

pytestmark = pytest.mark.vllm

WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "text", "text": " In Rome."}]},
    {"role": "assistant", "reasoning": "Look it up.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "sunny"},
]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
Make = Callable[[Any], list[int]]


@pytest.fixture
async def renderer() -> Any:
    """The server's renderer with our step in it, of which `make` is the way in."""

    class Renderer:
        model_config = SimpleNamespace(max_model_len=10_000_000)
        exclude_tools_when_tool_choice_none = True

        def _make_request_with_harmony(self, request: Any, should_include_tools: bool = True) -> None:
            pytest.fail("upstream's prompt")

    part, state = ChatCompletions(), SimpleNamespace(online_renderer=Renderer())
    part.attach(FastAPI(), arguments(), Settings())
    await part.start(None, state, Namespace())
    return state.online_renderer


def raw_request(renderer: Any, length: int | None, **state: Any) -> Request:
    app = FastAPI()
    app.state.online_renderer = renderer
    vars(app.state)["_state"].update(state)
    headers = [] if length is None else [(b"content-length", str(length).encode())]

    async def receive() -> Any:
        await asyncio.Event().wait()

    return Request({"type": "http", "app": app, "headers": headers}, receive)


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads in which prompts were rendered."""
    threads: list[str] = []

    def watched(conversation: Any, most: int | None = None) -> list[int]:
        threads.append(threading.current_thread().name)
        return render(conversation, most)

    monkeypatch.setattr(early, "render", watched)
    return threads


def chat(**fields: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(**{"model": "m", "messages": TALK, **fields})


FIELDS: dict[str, dict[str, Any]] = {
    "talk": {},
    "tools": {"tools": TOOLS, "reasoning_effort": "high"},
    "hidden tools": {"tools": TOOLS, "tool_choice": "none"},
    "form": {"response_format": FORM, "tools": TOOLS},
}


@pytest.mark.parametrize("name", FIELDS)
async def test_a_long_chat_prompt_is_there_when_vllm_asks_for_it(renderer: Any, rendered: list[str], name: str) -> None:
    request, plain = chat(**FIELDS[name]), chat(**FIELDS[name])
    settle(request.messages)
    await render_chat_early(request, raw_request(renderer, QUICK + 1))
    assert [thread.startswith("gptoss-render") for thread in rendered] == [True]
    shows_tools = "tool_choice" not in FIELDS[name] and "tools" in FIELDS[name]
    _, (given,) = renderer._make_request_with_harmony(constrain(request, "function"), shows_tools)
    assert len(rendered) == 1, "nothing is left to do on the event loop"
    early._EARLY.set(())
    _, (wanted,) = renderer._make_request_with_harmony(constrain(plain, "function"), shows_tools)
    assert given["prompt_token_ids"] == wanted["prompt_token_ids"]


async def test_a_long_prompt_of_a_message_is_there_too(renderer: Any, rendered: list[str]) -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

    tool = {"name": "get_weather", "input_schema": WEATHER["parameters"]}
    turns = [
        {"role": "user", "content": "Weather?"},
        {"role": "system", "content": "Hurry."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "get_weather", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "sunny"}]},
    ]
    body = AnthropicMessagesRequest(model="m", max_tokens=9, messages=turns, tools=[tool])
    await _render_early(body, raw_request(renderer, None, anthropic_serving_messages=handler()))
    handled = handler().to_chat_completion_request(body, disabled_thinking_effort="low")
    renderer._make_request_with_harmony(constrain(handled, "function"), True)
    assert len(rendered) == 1


async def test_a_short_prompt_costs_no_thread(renderer: Any, rendered: list[str]) -> None:
    await render_chat_early(chat(), raw_request(renderer, QUICK))
    assert not rendered


async def test_another_prompt_is_never_taken_for_the_one_that_is_wanted(renderer: Any, rendered: list[str]) -> None:
    await render_chat_early(chat(messages=[{"role": "user", "content": "Mine."}]), raw_request(renderer, None))
    _, (given,) = renderer._make_request_with_harmony(chat(messages=[{"role": "user", "content": "Yours."}]), False)
    assert len(rendered) == 2
    assert given["prompt_token_ids"] != early._EARLY.get()[0][1]


async def test_a_chat_prompt_beyond_the_window_is_refused_before_it_is_all_read(renderer: Any) -> None:
    renderer.model_config = SimpleNamespace(max_model_len=1000)
    request = chat(messages=[{"role": "user", "content": "é" * 4_000_000}])
    with pytest.raises(HTTPException, match="maximum context length is 1000 tokens.* more than 2000 tokens") as refused:
        await render_chat_early(request, raw_request(renderer, None))
    assert refused.value.status_code == 400
    request.truncate_prompt_tokens = 10  # vLLM cuts it
    request.messages[0]["content"] = "é " * 2000
    await render_chat_early(request, raw_request(renderer, None))
    assert len(early._EARLY.get()[0][1]) > 1000


def handler() -> Any:
    """The part of vLLM's handler of /v1/messages that our route calls."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages as Serving

    return SimpleNamespace(_merge_inline_system=False, to_chat_completion_request=Serving.to_chat_completion_request)


@pytest.fixture
def app(renderer: Any) -> FastAPI:
    """Our routes over handlers that take their prompts as vLLM's do, with the plugin's limits; keys are checked."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest

    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def answer(request: ChatCompletionRequest, raw_request: Request) -> int:
        del raw_request
        return len(renderer._make_request_with_harmony(request, False)[1][0]["prompt_token_ids"])

    @router.post("/v1/chat/completions/batch")
    async def answer_all(request: BatchChatCompletionRequest, raw_request: Request) -> list[int]:
        singles = map(request.to_chat_completion_request, request.messages)
        return [await answer(single, raw_request) for single in singles]

    @router.post("/v1/messages")
    async def answer_message(request: AnthropicMessagesRequest, raw_request: Request) -> int:
        return await answer(
            raw_request.app.state.anthropic_serving_messages.to_chat_completion_request(request), raw_request
        )

    app = attached_around(router)
    app.state.online_renderer, app.state.anthropic_serving_messages = renderer, handler()
    callers.set_keys_are_checked(app, True)
    bodies.bound(app, bodies.BodyLimits())
    return app


def body_of(path: str, text: str) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    talks: Any = [[message], [message]] if path.endswith("batch") else [message]
    return {"model": "m", "messages": talks, **({"max_tokens": 9} if path == "/v1/messages" else {})}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/batch", "/v1/messages"])
async def test_every_route_renders_apart_and_in_the_turn_of_its_key(
    app: FastAPI, rendered: list[str], path: str
) -> None:
    done: list[str] = []

    async def post(key: str, characters: int) -> None:
        body, headers = body_of(path, "é" * characters), {"authorization": f"Bearer {key}"}
        answer = await http.post(path, json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        done.append(key)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        alice = [asyncio.create_task(post("alice", 400_000)) for _ in range(4)]
        async with asyncio.timeout(60):
            while not rendered:
                await asyncio.sleep(0.001)
            await post("bob", 20_000)
        assert done.count("alice") <= 1, "bob waited for one prompt of alice's at most"
        await asyncio.gather(*alice)
    assert all(thread.startswith("gptoss-render") for thread in rendered)
    assert len(rendered) == 5 * (2 if path.endswith("batch") else 1)


async def test_a_long_prompt_in_a_batch_is_refused_before_it_is_all_read(app: FastAPI, renderer: Any) -> None:
    renderer.model_config = SimpleNamespace(max_model_len=1000)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer = await http.post("/v1/chat/completions/batch", json=body_of("batch", "é" * 1_000_000))
    assert (answer.status_code, "context length is 1000 tokens" in answer.text) == (400, True)


async def rendering_of(caller: str, characters: int, log: list[str]) -> None:
    CALLER.set(caller)
    await in_renderer(lambda: encode("é" * characters))
    log.append(caller)


async def test_a_caller_has_so_many_prompts_waiting_at_most() -> None:
    log: list[str] = []
    tasks = [asyncio.create_task(rendering_of("alice", 200_000, log)) for _ in range(WAITING + 1)]
    await asyncio.sleep(0)
    with pytest.raises(BusyError, match="64 prompts"):
        await rendering_of("alice", 1, log)
    await rendering_of("bob", 1, log)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await rendering_of("alice", 1, log)  # all places are free again
    assert log == ["bob", "alice"]


async def test_what_nobody_waits_for_is_not_rendered_to_its_end() -> None:
    task = asyncio.create_task(in_renderer(lambda: encode("é" * 20_000_000)))
    await asyncio.sleep(0.05)
    began = time.process_time()
    task.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait([task])
    assert task.cancelled()
    assert time.process_time() - began < 1


async def test_what_is_wrong_is_left_to_the_handler(renderer: Any, rendered: list[str]) -> None:
    from vllm.exceptions import VLLMValidationError

    request = chat(messages=[{"role": "tool", "tool_call_id": "nobody", "content": "x"}])
    await render_chat_early(request, raw_request(renderer, None))
    with pytest.raises(VLLMValidationError, match="tool_call_id"):
        renderer._make_request_with_harmony(request, False)
    assert not rendered
    with pytest.raises(VLLMValidationError, match="text"):
        settle(chat(messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}]).messages)
