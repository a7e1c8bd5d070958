"""`vllm-gptoss tools serve`: our python and browser tools as MCP servers, for other engines.

Each tool is a server of its own, named `python` or `browser`, with the prompt's text as instructions: what vLLM's
`--tool-server host:port` and OpenAI's example servers expect. Over HTTP a tool is at `/{name}/mcp` and `/{name}/sse`; a
tool served alone is at `/mcp` and `/sse` too.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import mcp_types as types
import typer
from mcp.server.lowlevel import Server
from mcp.server.sse import SseServerTransport
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from vllm_gptoss.tools.config import ToolConfigError
from vllm_gptoss.tools.gate import GatedProvider
from vllm_gptoss.tools.protocol import (
    Content,
    Image,
    Namespace,
    SessionOptions,
    Text,
    ToolCall,
    ToolKind,
    ToolResult,
)
from vllm_gptoss.tools.server import ToolServer
from vllm_gptoss.tools.version import VERSION

logger = logging.getLogger(__name__)

_CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def tool_server(provider: GatedProvider) -> Server[Any]:
    """`provider`'s namespace as an MCP server, its state kept by `conversation`."""
    namespace = next(iter(provider.namespaces()))

    async def list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=_tools(namespace))

    async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        session = await provider.open(conversation(ctx), SessionOptions(response_id=f"mcp-{ctx.request_id}"))
        try:
            return _answer(await session.call(_call(namespace, ctx, params)))
        finally:
            await session.aclose()

    async def discover(ctx: Any, params: Any) -> types.DiscoverResult:
        # Versions without the handshake have no sessions, and these tools are nothing without: cursors, variables.
        versions = MODERN_PROTOCOL_VERSIONS if conversation(ctx) else HANDSHAKE_PROTOCOL_VERSIONS
        return types.DiscoverResult(
            supported_versions=list(versions),
            capabilities=server.get_capabilities(protocol_version=ctx.protocol_version),
            instructions=server.instructions,
        )

    server: Server[Any] = Server(
        namespace.name,
        version=VERSION,
        instructions=namespace.description,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    server.add_request_handler("server/discover", types.RequestParams, discover)
    return server


def conversation(ctx: Any) -> str:
    """Whose state a call sees; empty, and so nobody else's and gone after the call, when the caller names none.

    vLLM names it in the `x-session-id` header, OpenAI's example server in `_meta.client_id`. Connections of protocols
    before 2026-07-28 have ids of their own, and clients that name nothing are led to those; a stdio process has one
    caller.
    """
    request = ctx.request if isinstance(ctx.request, Request) else None
    named = (ctx.meta or {}).get("client_id")
    if request is None:
        return f"mcp:{named or 'stdio'}"
    header = request.headers.get
    named = header("x-session-id") or named or header("mcp-session-id") or request.query_params.get("session_id")
    return f"mcp:{named}" if named else ""


def _tools(namespace: Namespace) -> list[types.Tool]:
    if namespace.kind is ToolKind.PYTHON:
        # Text in, text out: the schema is for callers, not for gpt-oss's prompt.
        meta = {"include_in_prompt": False}
        return [types.Tool(name="python", description=namespace.description, input_schema=_CODE, _meta=meta)]
    return [
        types.Tool(
            name=tool.name, description=tool.description, input_schema=dict(tool.parameters or {"type": "object"})
        )
        for tool in namespace.tools
    ]


def _call(namespace: Namespace, ctx: Any, params: types.CallToolRequestParams) -> ToolCall:
    arguments = params.arguments or {}
    if namespace.kind is ToolKind.PYTHON:
        return ToolCall(str(ctx.request_id), namespace.name, None, str(arguments.get("code", "")))
    return ToolCall(str(ctx.request_id), namespace.name, params.name, json.dumps(arguments))


def _answer(result: ToolResult) -> types.CallToolResult:
    return types.CallToolResult(content=[_block(part) for part in result.content], is_error=result.error is not None)


def _block(part: Content) -> types.TextContent | types.ImageContent:
    if isinstance(part, Image):
        data = base64.b64encode(part.data).decode()
        return types.ImageContent(type="image", data=data, mime_type=part.media_type)
    text = part.text if isinstance(part, Text) else f"[file: {part.filename}, {part.bytes} bytes]"
    return types.TextContent(type="text", text=text)


def http_app(providers: Sequence[GatedProvider], host: str) -> Starlette:
    """Every tool over streamable HTTP and SSE. On the loopback, other Host and Origin headers are refused."""
    security = None
    if host in _LOOPBACK:
        security = TransportSecuritySettings(
            allowed_hosts=["127.0.0.1:*", "localhost:*", "[::1]:*"],
            allowed_origins=["http://127.0.0.1:*", "http://localhost:*", "http://[::1]:*"],
        )
    routes: list[BaseRoute] = []
    lifespans = []
    for provider in providers:
        prefixes = [f"/{provider.name}", *([""] if len(providers) == 1 else [])]
        for prefix in prefixes:
            server = tool_server(provider)
            inner = server.streamable_http_app(streamable_http_path=f"{prefix}/mcp", transport_security=security)
            routes += [*_sse(server, prefix, security), *inner.routes]
            lifespans.append(inner.router.lifespan_context)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for enter in lifespans:
                await stack.enter_async_context(enter(app))
            yield

    return Starlette(routes=routes, lifespan=lifespan)


def _sse(server: Server[Any], prefix: str, security: TransportSecuritySettings | None) -> list[BaseRoute]:
    transport = SseServerTransport(f"{prefix}/messages/", security_settings=security)

    async def connect(request: Request) -> Response:
        async with transport.connect_sse(request.scope, request.receive, request._send) as (read, write):
            await server.run(read, write, server.create_initialization_options())
        return Response()

    return [
        Route(f"{prefix}/sse", endpoint=connect, methods=["GET"]),
        Mount(f"{prefix}/messages/", app=transport.handle_post_message),
    ]


async def run_stdio(provider: GatedProvider) -> None:
    """Serves one tool on stdin and stdout until stdin ends."""
    server = tool_server(provider)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


async def serve_tools(spec: str, transport: Literal["http", "stdio"], host: str, port: int) -> None:
    """Starts the tools of `spec` and serves those that are there.

    Raises:
        ToolConfigError: `spec` is wrong, none of its tools can be served, or stdio is asked of more than one.
    """
    import uvicorn

    async with ToolServer.from_spec(spec) as tools:
        providers = [p for p in tools.providers if not p.unavailable and p.namespaces()]
        if not providers:
            raise ToolConfigError("no tool can be served: " + "; ".join(str(o.unavailable) for o in tools.offers()))
        if transport == "stdio":
            if len(providers) > 1:
                raise ToolConfigError("stdio serves one tool: say python or browser")
            await run_stdio(providers[0])
            return
        await uvicorn.Server(uvicorn.Config(http_app(providers, host), host=host, port=port)).serve()


def serve(
    spec: Annotated[str, typer.Argument(help="python, browser, demo for both, or a tools.yaml")] = "demo",
    transport: Annotated[str, typer.Option(help="http (streamable HTTP and SSE) or stdio")] = "http",
    host: Annotated[str, typer.Option(help="address to listen on; there is no authentication")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8001,
) -> None:
    """Serve the python and browser tools as MCP servers, so that other engines can use them."""
    if transport not in ("http", "stdio"):
        typer.echo(f"error: --transport is http or stdio, not {transport}", err=True)
        raise typer.Exit(2)
    try:
        asyncio.run(serve_tools(spec, "stdio" if transport == "stdio" else "http", host, port))
    except ToolConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
