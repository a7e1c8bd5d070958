"""A real server on a real socket: our routes, a replay engine for a model, fake tools, a SQLite file."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI

from tests.responses.fakes import FakeProvider
from tests.sockets import listening
from vllm_gptoss import _vllm
from vllm_gptoss.harmony.tokens import encoding
from vllm_gptoss.responses.config import ResponsesConfig
from vllm_gptoss.responses.endpoint import ResponsesEndpoint
from vllm_gptoss.responses.engine import ReplayEngine
from vllm_gptoss.responses.errors import ApiError
from vllm_gptoss.responses.toolset import Providers

MODEL = "gpt-oss-20b"


def harmony(text: str) -> list[int]:
    """Token ids of text with control tokens spelled out."""
    ids: list[int] = encoding().encode(text, allowed_special="all")
    return ids


def text_of_prompt(prompt: Sequence[int]) -> str:
    return str(encoding().decode(list(prompt)))


class Script:
    """What the model says, turn by turn; the last turn repeats."""

    def __init__(self, *turns: str) -> None:
        self.turns = list(turns)
        self.asked = 0

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        del prompt
        turn = self.turns[min(self.asked, len(self.turns) - 1)]
        self.asked += 1
        return harmony(turn)


@dataclass
class Running:
    """A running server, and the handles a test needs on its inside."""

    url: str
    engine: ReplayEngine
    endpoint: ResponsesEndpoint
    loop: asyncio.AbstractEventLoop
    providers: Sequence[FakeProvider] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    def client(self, key: str = "alice") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def http(self, key: str = "alice") -> httpx.Client:
        return httpx.Client(base_url=f"{self.url}/v1", headers={"Authorization": f"Bearer {key}"}, timeout=30)

    def prompt(self, index: int = -1) -> str:
        """The text of a prompt that the engine was given."""
        return text_of_prompt(self.engine.prompts[index])

    def call(self, work: Any) -> Any:
        """Runs a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)


def models(name: str | None) -> tuple[str, Any]:
    if name not in (None, MODEL):
        raise ApiError(f"The model '{name}' does not exist.", param="model", code="model_not_found", status=404)
    return MODEL, None


@contextmanager
def running(engine: ReplayEngine, config: ResponsesConfig, providers: Sequence[FakeProvider] = ()) -> Iterator[Running]:
    endpoint = ResponsesEndpoint(config)
    app = FastAPI()
    endpoint.attach_router(app)
    listener = listening()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="websockets-sansio"))
    ready: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        await endpoint.open(engine, models, Providers(providers))
        ready.append(asyncio.get_running_loop())
        await server.serve([listener])
        await endpoint.aclose()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with httpx.Client() as probe:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            thread.join(0.01)
        probe.get(url)
    try:
        yield Running(url, engine, endpoint, ready[0], providers)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """vLLM's server has xgrammar before its first request; its import takes up to half a minute on a busy machine."""
    _vllm.schema_is_enforceable({})


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers: `start("<|channel|>final…", …, rate=…, providers=[…], config={…})`.

    `GPTOSS_TEST_STORE=postgresql://…` runs the same tests on another database.
    """
    from contextlib import ExitStack

    with ExitStack() as stack:

        def begin(
            *turns: str | Callable[[Sequence[int]], Sequence[int]],
            providers: Sequence[FakeProvider] = (),
            config: Mapping[str, Any] | None = None,
            **engine: Any,
        ) -> Running:
            script = turns[0] if callable(turns[0]) else Script(*turns)  # type: ignore[arg-type]
            store = os.environ.get("GPTOSS_TEST_STORE") or str(tmp_path / "store.sqlite")
            settings = {"store": store, **(config or {})}
            replay = ReplayEngine(script, **engine)
            return stack.enter_context(running(replay, ResponsesConfig(**settings), providers))

        yield begin
