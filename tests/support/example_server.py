"""A real MCP server with every kind of result, run as a separate process: `python example_server.py TRANSPORT`.

HTTP transports bind a free port of the loopback and print it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import anyio
import uvicorn
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp_types import CallToolResult, TextContent
from pydantic import BaseModel, Field

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360000000000500010d0a2db40000000049454e44ae426082"
)


class Point(BaseModel):
    x: int
    y: int


def build(name: str = "example") -> MCPServer:
    server = MCPServer(name, instructions="Tools for tests.", log_level="CRITICAL")
    notes: dict[str, list[str]] = {}

    def tool(**options: Any) -> Callable[..., Any]:
        return server.tool(structured_output=False, **options)

    @tool()
    def add(a: Annotated[int, Field(description="first")], b: int = 1) -> str:
        """Adds two numbers."""
        return str(a + b)

    @tool()
    def empty() -> None:
        """Gives nothing back."""

    @tool()
    def picture() -> list[Any]:
        """Text around an image."""
        return ["before", Image(data=PNG, format="png"), "after"]

    @server.tool()
    def point() -> Point:
        """Structured content."""
        return Point(x=3, y=4)

    @tool()
    def structured_only() -> CallToolResult:
        """Structured content without any text."""
        return CallToolResult(content=[], structured_content={"answer": 42})

    @tool()
    def huge(chars: int) -> str:
        """A long text."""
        return "x" * chars

    @tool()
    def photo(size: int) -> Image:
        """An image of some bytes."""
        return Image(data=bytes(size), format="png")

    @tool(name="odd name (v2)")
    def odd() -> str:
        """Has a name that ends a Harmony header."""
        return "odd"

    @tool()
    def fail() -> str:
        """Raises."""
        raise ValueError("the disk is full")

    @tool()
    def refuse() -> CallToolResult:
        """Answers with an error."""
        return CallToolResult(content=[TextContent(type="text", text="no such ticket")], is_error=True)

    @tool()
    async def hang(note: str) -> str:
        """Never answers; notes whether it was cancelled."""
        noted = notes.setdefault(note, ["began"])
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            noted.append("cancelled")
            raise
        return "never"

    @tool()
    async def block() -> str:
        """Holds up the whole process."""
        time.sleep(3600)  # noqa: ASYNC251
        return "never"

    @tool()
    def seen(note: str) -> str:
        """Records of `hang`."""
        return ",".join(notes.get(note, ["nothing"]))

    @tool()
    def die() -> str:
        """Ends the process without answering."""
        os._exit(3)

    @tool()
    def who(ctx: Context[Any, Any]) -> str:
        """The conversation that the caller names."""
        return str((ctx.request_context.meta or {}).get("client_id"))

    @tool()
    def header(name: str, ctx: Context[Any, Any]) -> str:
        """A header of the request."""
        request = ctx.request_context.request
        return str(request.headers.get(name)) if request is not None else "no request"

    @tool(meta={"include_in_prompt": False})
    def unlisted() -> str:
        """Not for the prompt."""
        return "unlisted"

    @tool()
    async def grow(ctx: Context[Any, Any]) -> str:
        """Adds a tool and sends the notification."""

        def grown() -> str:
            """Came later."""
            return "grown"

        server.add_tool(grown, structured_output=False)
        await ctx.session.send_tool_list_changed()
        await ctx.notify_tools_changed()
        return "grew"

    return server


def serve(transport: str) -> None:
    server = build()
    if transport == "stdio":
        asyncio.run(server.run_stdio_async())
        return
    app = server.sse_app() if transport == "sse" else server.streamable_http_app()
    with socket.create_server(("127.0.0.1", int(os.environ.get("PORT", "0")))) as listening:
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    serve(sys.argv[1])
