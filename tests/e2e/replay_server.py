"""`python -m tests.e2e.replay_server TOOLS STORE`: our endpoint, its real tools, and a model that says what it is told.

A user's message is a JSON list: the turns that the model generates, control tokens spelled out. Prints its port.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI

from demo.server import NAME
from tests.sockets import listening
from vllm_gptoss.harmony.tokens import END, encoding
from vllm_gptoss.responses.config import ResponsesConfig
from vllm_gptoss.responses.endpoint import ResponsesEndpoint
from vllm_gptoss.responses.engine import ReplayEngine
from vllm_gptoss.responses.toolset import Providers
from vllm_gptoss.tools.server import ToolServer

USER = encoding().encode("<|start|>user<|message|>", allowed_special="all")
TURN = re.compile(r" to=assistant(?:(?!<\|start\|>).)*<\|end\|><\|start\|>assistant", re.DOTALL)


class Obedient(ReplayEngine):
    """Says the turn that comes next, and forgets what it was asked."""

    def __init__(self) -> None:
        super().__init__(self._next, chunk=16)

    def _next(self, prompt: Sequence[int]) -> list[int]:
        self.prompts.clear()
        self.samplings.clear()
        prompt = list(prompt)
        header = next(at for at in range(len(prompt), 0, -1) if prompt[at : at + len(USER)] == USER)
        end = prompt.index(END, header)
        script = encoding().decode(prompt[header + len(USER) : end])
        turn: str = json.loads(script)[len(TURN.findall(encoding().decode(prompt[end:])))]
        said: list[int] = encoding().encode(turn, allowed_special="all")
        return said


def models(name: str | None) -> tuple[str, Any]:
    return name or NAME, None


async def main(tools: str, store: str) -> None:
    endpoint, app = ResponsesEndpoint(ResponsesConfig(store=store)), FastAPI()
    endpoint.attach_router(app)
    with listening() as listener:
        async with ToolServer.from_spec(tools) as server:
            await endpoint.open(Obedient(), models, Providers(server.providers, server.remote))
            print(listener.getsockname()[1], flush=True)
            await uvicorn.Server(uvicorn.Config(app, log_level="warning")).serve([listener])
            await endpoint.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
