"""`python -m tests.support.responses.process STORE PORT TURN RATE`: a server in a separate process, to be killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from tests.support import warm_vllm
from tests.support.responses.replay import ReplayEngine
from tests.support.responses.server import Script, models
from tests.support.waiting import soon
from vllm_gptoss.cli.bench.worker import free_port
from vllm_gptoss.server.responses.endpoint import ResponsesEndpoint
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.prompt.toolset import Providers


def command(store: Path, port: int, text: str, rate: float) -> list[str]:
    return [sys.executable, "-m", __name__, str(store), str(port), text, str(rate)]


def killable(store: Path, text: str, rate: float) -> tuple[Any, httpx.Client]:
    port = free_port()
    with store.with_suffix(".log").open("ab") as log:
        process = warm_vllm.popen(
            command(store, port, text, rate), env=os.environ, stdout=log, stderr=subprocess.STDOUT
        )
    return process, client_of(process, port)


def client_of(process: Any, port: int) -> httpx.Client:
    """Returned when the process answers."""
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=30)

    def up() -> bool:
        assert process.poll() is None
        try:
            client.get("/")
        except httpx.TransportError:
            return False
        return True

    soon(up)
    return client


async def main(store: str, port: str, text: str, rate: str) -> None:
    endpoint, app = ResponsesEndpoint(ResponsesOptions(store=store, heartbeat=0.5)), FastAPI()
    endpoint.attach_router(app)
    await endpoint.open(ReplayEngine(Script(text), rate=float(rate)), models, Providers())
    await uvicorn.Server(uvicorn.Config(app, port=int(port), log_level="warning")).serve()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
