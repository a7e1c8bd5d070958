"""Real servers on the loopback, in this process or a separate one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from tests.support.sockets import listening
from vllm_gptoss.tools.protocol import SessionOptions, ToolSession
from vllm_gptoss.tools.server import ToolServer

EXAMPLE = Path(__file__).parent / "example_server.py"


@contextlib.asynccontextmanager
async def running(app: Any, **options: Any) -> AsyncIterator[str]:
    """The address of a server that runs the ASGI `app` in this event loop; `options` are uvicorn's."""
    with listening() as listener:
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, **options)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started and not task.done():
                await asyncio.sleep(0)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def session_of(tools: ToolServer, name: str, conversation: str) -> ToolSession:
    """The tool `name` as the conversation sees it: of several, the first that is there."""
    there = [p for p in tools.providers if not p.unavailable and name in (n.name for n in p.namespaces())]
    return await there[0].open(conversation, SessionOptions())


@contextlib.contextmanager
def example(transport: str, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address and process of `example_server.py` over an HTTP transport."""
    command = [sys.executable, str(EXAMPLE), transport]
    environ = {**os.environ, "PORT": str(port)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        bound = int(process.stdout.readline())
        yield f"http://127.0.0.1:{bound}/{'sse' if transport == 'sse' else 'mcp'}", process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
