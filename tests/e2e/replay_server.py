"""`python -m tests.e2e.replay_server TOOLS STORE`: our endpoint, its real tools, and an obedient model.

A user's message is a JSON list: the turns that the model generates, control tokens spelled out; `{users}` in them is
the number of user messages that the model was shown. Prints its port. `/pause` returns the event loop's longest pause
since the previous call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections.abc import Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI

from demo.server import NAME
from tests.support.loop_watch import watched
from tests.support.responses.replay import ReplayEngine
from tests.support.responses.upgrading import be_later
from tests.support.sockets import listening
from vllm_gptoss.server.harmony.tokens import END, encoding
from vllm_gptoss.server.responses.endpoint import ResponsesEndpoint
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.prompt.toolset import Providers
from vllm_gptoss.tools.server import ToolServer

USER = encoding().encode("<|start|>user<|message|>", allowed_special="all")
TURN = re.compile(r" to=assistant(?:(?!<\|start\|>).)*<\|end\|><\|start\|>assistant", re.DOTALL)


class Obedient(ReplayEngine):
    """Returns the next turn and forgets the request."""

    def __init__(self, rate: float | None) -> None:
        super().__init__(self._next, rate=rate, chunk=1 if rate else 16)

    def _next(self, prompt: Sequence[int]) -> list[int]:
        self.prompts.clear()
        self.samplings.clear()
        prompt = list(prompt)
        header = next(at for at in range(len(prompt), 0, -1) if prompt[at : at + len(USER)] == USER)
        end = prompt.index(END, header)
        script = encoding().decode(prompt[header + len(USER) : end])
        turn: str = json.loads(script)[len(TURN.findall(encoding().decode(prompt[end:])))]
        users = sum(prompt[at : at + len(USER)] == USER for at in range(len(prompt)))
        said: list[int] = encoding().encode(turn.replace("{users}", str(users)), allowed_special="all")
        return said


def models(name: str | None) -> tuple[str, Any]:
    return name or NAME, None


async def main(tools: str, store: str, port: int, rate: float | None, clock: float, later: bool) -> None:
    if later:
        be_later()
    right = time.time
    time.time = lambda: right() + clock
    endpoint, app = ResponsesEndpoint(ResponsesOptions(store=store)), FastAPI()
    endpoint.attach_router(app)
    async with watched() as watch:

        @app.get("/pause")
        async def pause() -> float:
            longest, watch.longest = watch.longest, 0.0
            return longest

        await serve(endpoint, app, tools, port, rate)


async def serve(endpoint: ResponsesEndpoint, app: FastAPI, tools: str, port: int, rate: float | None) -> None:
    with listening(port) as listener:
        async with ToolServer.from_spec(tools) as server:
            await endpoint.open(Obedient(rate), models, Providers(server.providers, server.remote))
            print(listener.getsockname()[1], flush=True)
            await uvicorn.Server(uvicorn.Config(app, log_level="warning")).serve([listener])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("tools")
    parser.add_argument("store")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rate", type=float, help="tokens per second and stream")
    parser.add_argument("--clock", type=float, default=0.0, help="seconds by which this host's clock is wrong")
    parser.add_argument("--later", action="store_true", help="of the next release, with a newer schema")
    asyncio.run(main(**vars(parser.parse_args())))
