"""The plugin's route of `/v1/messages` prepares a request for vLLM's handler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.testclient import TestClient

from tests.server.chat.arguments import attached_around
from vllm_gptoss.server.chat import messages_content
from vllm_gptoss.server.harmony.enforce import compiling
from vllm_gptoss.tools.confined import BusyError
from vllm_gptoss.tools.protocol import CALLER

pytestmark = pytest.mark.vllm


@pytest.fixture
def app() -> FastAPI:
    """A route that shows the request it was given."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    router = APIRouter()

    @router.post("/v1/messages")
    async def create(request: AnthropicMessagesRequest, raw_request: Request) -> dict[str, Any]:
        assert isinstance(raw_request, Request)
        return request.model_dump(include={"thinking", "output_config"})

    @router.post("/v1/chat/completions")
    async def chat(request: ChatCompletionRequest, raw_request: Request) -> None:
        del request, raw_request

    return attached_around(router)


def ask(app: FastAPI, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 40_000, "messages": [{"role": "user", "content": "hi"}], **fields}
    answer = TestClient(app).post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    seen: dict[str, Any] = answer.json()
    return seen


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": {"type": "string"}}}}),
        ("/v1/messages", {"tools": [{"name": "f", "strict": True, "input_schema": {"type": "object"}}]}),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string"}}}},
        ),
    ],
)
def test_busy_workers_are_no_fault_of_the_schema(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    class Busy:
        async def run(self, *_: Any, **__: Any) -> Any:
            raise BusyError("256 jobs wait")

    monkeypatch.setattr(compiling, "pool", Busy)
    monkeypatch.setattr(compiling, "_known", {})
    body = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}], **fields}
    answer = TestClient(app).post(path, json=body)
    assert (answer.status_code, answer.headers.get("retry-after")) == (503, "5"), answer.text
    assert "256 jobs wait" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("budget", "effort"), [(1024, "low"), (4095, "low"), (4096, "medium"), (16_383, "medium"), (31_999, "high")]
)
def test_a_budget_becomes_the_effort_it_is_meant_as(app: FastAPI, budget: int, effort: str) -> None:
    """vLLM refuses a budget unless the engine was started with a reasoning configuration."""
    schema = {"type": "object"}
    seen = ask(
        app,
        thinking={"type": "enabled", "budget_tokens": budget},
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert seen["thinking"]["type"] == "adaptive"
    assert seen["output_config"]["effort"] == effort
    assert seen["output_config"]["format"]["json_schema"] == schema


def test_a_named_effort_wins_over_a_budget(app: FastAPI) -> None:
    seen = ask(app, thinking={"type": "enabled", "budget_tokens": 30_000}, output_config={"effort": "low"})
    assert (seen["thinking"]["type"], seen["output_config"]["effort"]) == ("adaptive", "low")


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
def test_thinking_without_a_budget_is_as_before(app: FastAPI, thinking: Any) -> None:
    seen = ask(app, thinking=thinking)
    assert seen == {"thinking": thinking, "output_config": None}


def test_an_engine_that_cuts_thinking_keeps_the_budget(app: FastAPI) -> None:
    """`--reasoning-config` was given: vLLM counts the tokens itself."""
    app.state.engine_client = SimpleNamespace(
        vllm_config=SimpleNamespace(reasoning_config=SimpleNamespace(enabled=True))
    )
    seen = ask(app, thinking={"type": "enabled", "budget_tokens": 2000})
    assert seen["thinking"]["budget_tokens"] == 2000


async def test_a_pdf_file_waits_in_the_turn_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header must not be the caller: unchecked keys are one caller."""
    seen: list[str] = []

    async def pdf_text(data: str, name: str, caller: str) -> str:
        seen.append(caller)
        return data + name

    monkeypatch.setattr(messages_content, "pdf_text", pdf_text)
    source = {"type": "base64", "media_type": "application/pdf", "data": "x"}
    block = SimpleNamespace(type="text", text="", source=source)
    CALLER.set("alice")
    await messages_content.ContentReader().read(SimpleNamespace(messages=[SimpleNamespace(content=[block])]))
    assert seen == ["alice"]
