"""A real MCP server of tools that the small model knows: `python -m tests.support.mcp_server TRANSPORT FOLDER [PORT]`.

While FOLDER holds a file `hold`, a call writes the process's id into `held` there and never answers.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from mcp.server.mcpserver import Image, MCPServer

from tests.support.example_server import PNG


def build(folder: Path) -> MCPServer:
    server = MCPServer("small", instructions="Tools that the small model knows.", log_level="CRITICAL")

    async def pause() -> None:
        if (folder / "hold").exists():
            (folder / "held.new").write_text(str(os.getpid()))
            (folder / "held.new").rename(folder / "held")
            await anyio.sleep_forever()

    @server.tool(structured_output=False)
    async def get_forecast(city: str, days: int) -> str:
        """Weather forecast."""
        await pause()
        return f"No rain in {city} for {days} day."

    @server.tool(structured_output=False)
    async def get_alerts(state: str) -> str:
        """Weather alerts of a state."""
        raise ValueError(f"no connection to the office of {state}")

    @server.tool(structured_output=False)
    async def repeat(text: str) -> str:
        """Repeats a text."""
        await pause()
        return text

    @server.tool(structured_output=False)
    async def add(a: int, b: int) -> str:
        """Adds two numbers."""
        await pause()
        return str(a + b)

    @server.tool(structured_output=False)
    async def picture() -> list[Any]:
        """A picture."""
        return ["here it is", Image(data=PNG, format="png")]

    @server.tool(structured_output=False)
    async def delete_file(path: str) -> str:
        """Deletes a file."""
        return f"deleted {path}"

    return server


def main(transport: str, folder: str, port: str = "0") -> None:
    server = build(Path(folder))
    if transport == "stdio":
        anyio.run(server.run_stdio_async)
        return
    app = server.sse_app() if transport == "sse" else server.streamable_http_app()
    with socket.create_server(("127.0.0.1", int(port))) as listening:
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
