"""A real server on a real socket: our routes, a replay engine for a model, fake tools, a SQLite file."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import uvicorn
from fastapi import FastAPI

from tests.support.responses.fakes import FakeProvider
from tests.support.responses.replay import ReplayEngine
from tests.support.sockets import listening
from vllm_gptoss.server.harmony.tokens import encoding
from vllm_gptoss.server.http import callers
from vllm_gptoss.server.responses.endpoint import ResponsesEndpoint
from vllm_gptoss.server.responses.errors import ApiError
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.prompt.toolset import Providers, Remote

MODEL = "gpt-oss-20b"


def harmony(text: str) -> list[int]:
    """Token ids of text with control tokens spelled out."""
    ids: list[int] = encoding().encode(text, allowed_special="all")
    return ids


def text_of_prompt(prompt: Sequence[int]) -> str:
    return str(encoding().decode(list(prompt)))


class Script:
    """The model's turns; the last one repeats."""

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
def running(
    engine: ReplayEngine, config: ResponsesOptions, providers: Sequence[FakeProvider] = (), remote: Remote | None = None
) -> Iterator[Running]:
    endpoint = ResponsesEndpoint(config)
    app = FastAPI()
    callers.set_keys_are_checked(app, True)
    endpoint.attach_router(app)
    listener = listening()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="websockets-sansio"))
    ready: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        await endpoint.open(engine, models, Providers(providers, remote))
        ready.append(asyncio.get_running_loop())
        await server.serve([listener])

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


Start = Callable[..., Running]
"""The `start` fixture."""


def create(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = http.post("/responses", json={"model": MODEL, **fields}).raise_for_status().json()
    return body
