"""A server in a separate process, to be killed: `python -c SERVER store port turn rate`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from tests.support.waiting import soon
from vllm_gptoss.cli.bench.worker import free_port

SERVER = """
import asyncio, sys
from fastapi import FastAPI
import uvicorn
from tests.support.responses.server import Script, models
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.endpoint import ResponsesEndpoint
from tests.support.responses.replay import ReplayEngine
from vllm_gptoss.server.responses.prompt.toolset import Providers
async def main():
    endpoint, app = ResponsesEndpoint(ResponsesOptions(store=sys.argv[1], heartbeat=0.5)), FastAPI()
    endpoint.attach_router(app)
    await endpoint.open(ReplayEngine(Script(sys.argv[3]), rate=float(sys.argv[4])), models, Providers())
    server = uvicorn.Server(uvicorn.Config(app, port=int(sys.argv[2]), log_level="warning"))
    await server.serve()
asyncio.run(main())
"""


def killable(store: Path, text: str, rate: float) -> tuple[subprocess.Popen[bytes], httpx.Client]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(store), str(port), text, str(rate)])
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=30)

    def up() -> bool:
        assert process.poll() is None
        try:
            client.get("/")
        except httpx.TransportError:
            return False
        return True

    soon(up)
    return process, client
