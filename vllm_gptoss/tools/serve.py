"""`vllm-gptoss tools serve`: our python and browser tools as MCP servers, for our own replicas and other engines.

Each tool is a separate server, named `python` or `browser`, with the prompt's text as instructions: what vLLM's
`--tool-server host:port` and OpenAI's example servers expect. Over HTTP a tool is at `/{name}/mcp` and `/{name}/sse`; a
tool served alone is at `/mcp` and `/sse` too.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import mcp_types as types
import prometheus_client
import typer
from mcp.server.lowlevel import Server
from mcp.server.sse import SseServerTransport
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from vllm_gptoss.tools.config import ToolConfigError
from vllm_gptoss.tools.protocol import (
    Content,
    File,
    Image,
    Namespace,
    SessionOptions,
    Text,
    ToolCall,
    ToolKind,
    ToolProvider,
    ToolResult,
)
from vllm_gptoss.tools.server import ToolServer, ToolServerOptions
from vllm_gptoss.tools.service.access import VARIABLE, Doorkeeper, Keys, caller_of, load_keys
from vllm_gptoss.tools.service.files import file_routes
from vllm_gptoss.tools.service.sessions import DEFAULT, SessionLimits, Sessions
from vllm_gptoss.tools.service.wire import ANSWERED, MAX_FILES, Answered, Asked, KeptFile, asked, container_id
from vllm_gptoss.tools.version import VERSION

_CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def tool_server(provider: ToolProvider) -> Server[Any]:
    """`provider`'s namespace as an MCP server, its state by `conversation`."""
    namespace = next(iter(provider.namespaces()))

    async def list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=_tools(namespace))

    async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        said = asked(ctx.meta)
        session = await provider.open(conversation(ctx), _options(namespace, ctx, said))
        try:
            return _answer(await session.call(_call(namespace, ctx, params)), for_us=said is not None)
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
    """The conversation of a call; empty if the caller names none. Then the state ends with the call.

    vLLM names it in the `x-session-id` header, OpenAI's example server in `_meta.client_id`. Without a name the id of
    the MCP connection is used, which protocols before 2026-07-28 have. A stdio process has one caller. The caller is
    part of the returned name, so callers cannot use each other's conversations.
    """
    request = ctx.request if isinstance(ctx.request, Request) else None
    named = (ctx.meta or {}).get("client_id")
    if request is None:
        return f"mcp:{named or 'stdio'}"
    header = request.headers.get
    named = header("x-session-id") or named or header("mcp-session-id") or request.query_params.get("session_id")
    return f"mcp:{caller_of(request)}:{named}" if named else ""


def _options(namespace: Namespace, ctx: Any, said: Asked | None) -> SessionOptions:
    """The caller's data on the conversation. The owner is the key's name and the caller's user."""
    request = ctx.request if isinstance(ctx.request, Request) else None
    caller, said = caller_of(request), said or Asked()
    owner = f"{caller}/{said.owner}" if caller and said.owner else caller or said.owner
    recall = {"container": said.container} | ({} if said.call is None else {"call": said.call})
    return SessionOptions(
        response_id=f"mcp-{ctx.request_id}",
        owner=owner,
        past=[{"recipient": namespace.name, "recall": recall}] if said.ran else [],
        knows_all=said.call is not None,
        new_container=container_id(said.seed),
    )


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


def _answer(result: ToolResult, for_us: bool = False) -> types.CallToolResult:
    content: list[Any] = [_block(part) for part in result.content if not (for_us and isinstance(part, File))]
    failed = result.error is not None
    if not for_us:
        return types.CallToolResult(content=content, is_error=failed)
    files = [
        KeptFile(file_id=part.file_id, filename=part.filename, bytes=part.bytes)
        for part in result.content
        if isinstance(part, File)
    ]
    error = result.error.type if result.error else ""
    ran = str((result.recall or {}).get("call") or "")
    said = Answered(container=result.container_id or "", error=error, call=ran, files=files[:MAX_FILES])
    return types.CallToolResult(content=content, is_error=failed, _meta={ANSWERED: said.model_dump()})


def _block(part: Content) -> types.TextContent | types.ImageContent:
    if isinstance(part, Image):
        data = base64.b64encode(part.data).decode()
        return types.ImageContent(type="image", data=data, mime_type=part.media_type)
    text = part.text if isinstance(part, Text) else f"[file: {part.filename}, {part.bytes} bytes]"
    return types.TextContent(type="text", text=text)


def http_app(
    providers: Sequence[ToolProvider], host: str, keys: Keys | None = None, limits: SessionLimits = DEFAULT
) -> Starlette:
    """Every tool over streamable HTTP and SSE, for who has one of `keys`.

    Without any, on the loopback, other Host and Origin headers are refused: a web page could reach it else.
    """
    keys = keys or Keys()
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    if host in _LOOPBACK and not keys.digests:
        security = TransportSecuritySettings(
            allowed_hosts=["127.0.0.1:*", "localhost:*", "[::1]:*"],
            allowed_origins=["http://127.0.0.1:*", "http://localhost:*", "http://[::1]:*"],
        )
    routes: list[BaseRoute] = [Route("/health", _health), Mount("/metrics", prometheus_client.make_asgi_app())]
    lifespans = []
    for provider in providers:
        prefixes = [f"/{provider.name}", *([""] if len(providers) == 1 else [])]
        for prefix in prefixes:
            server = tool_server(provider)
            inner = server.streamable_http_app(
                streamable_http_path=f"{prefix}/mcp",
                transport_security=security,
                max_sessions=None,  # `Sessions` bounds them
            )
            routes += [*_sse(server, prefix, security), *inner.routes]
            lifespans.append(inner.router.lifespan_context)
        if any(namespace.kind is ToolKind.PYTHON for namespace in provider.namespaces()):
            routes += file_routes(provider)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for enter in lifespans:
                await stack.enter_async_context(enter(app))
            yield

    middleware = [Middleware(Doorkeeper, keys=keys), Middleware(Sessions, limits=limits)]
    return Starlette(routes=routes, lifespan=lifespan, middleware=middleware)


async def _health(request: Request) -> Response:
    return Response()


def _sse(server: Server[Any], prefix: str, security: TransportSecuritySettings) -> list[BaseRoute]:
    transport = SseServerTransport(f"{prefix}/messages/", security_settings=security)

    async def connect(request: Request) -> Response:
        async with transport.connect_sse(request.scope, request.receive, request._send) as (read, write):
            await server.run(read, write, server.create_initialization_options())
        return Response()

    return [
        Route(f"{prefix}/sse", endpoint=connect, methods=["GET"]),
        Mount(f"{prefix}/messages/", app=transport.handle_post_message),
    ]


@dataclass(frozen=True, slots=True)
class Listening:
    """Address, keys, and the proxies trusted to name the client. `open_to_all`: serve without keys on purpose."""

    host: str = "127.0.0.1"
    port: int = 8001
    keys_file: Path | None = None
    proxies: str = "127.0.0.1"
    open_to_all: bool = False
    sessions: SessionLimits = DEFAULT

    def keys(self) -> Keys:
        """Raises `ToolConfigError` where others could come in without a key, without `--no-auth`."""
        keys = load_keys(self.keys_file)
        if not keys.digests and self.host not in _LOOPBACK and not self.open_to_all:
            raise ToolConfigError(
                f"on {self.host} every client could run programs: give --keys-file or {VARIABLE}, "
                "or --no-auth where a gateway in front checks keys"
            )
        return keys


def default_folder() -> Path:
    """`$XDG_STATE_HOME/vllm-gptoss/files` (XDG Base Directory Specification): files outlive a restart."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "vllm-gptoss" / "files"


async def serve_tools(spec: str, transport: Literal["http", "stdio"], at: Listening) -> None:
    """Starts the tools of `spec` and serves those that are there. Raises ToolConfigError: `spec` is wrong, no tool of
    it can be served, stdio is requested for several, or a key is missing."""
    import uvicorn

    keys = at.keys() if transport == "http" else Keys()
    defaults = {"files": str(default_folder())} if transport == "http" else {}
    async with ToolServer.from_spec(spec, ToolServerOptions(python_defaults=defaults)) as tools:
        providers = [p for p in tools.providers if not p.unavailable and p.namespaces()]
        if not providers:
            raise ToolConfigError("no tool can be served: " + "; ".join(str(p.unavailable) for p in tools.providers))
        if transport == "stdio":
            if len(providers) > 1:
                raise ToolConfigError("stdio serves one tool: python or browser")
            server = tool_server(providers[0])
            async with stdio_server() as (read, write):  # until stdin ends
                await server.run(read, write, server.create_initialization_options())
            return
        app = http_app(providers, at.host, keys, at.sessions)
        await uvicorn.Server(uvicorn.Config(app, host=at.host, port=at.port, forwarded_allow_ips=at.proxies)).serve()


def serve(
    spec: Annotated[str, typer.Argument(help="python, browser, demo for both, or a tools.yaml")] = "demo",
    transport: Annotated[str, typer.Option(help="http (streamable HTTP and SSE) or stdio")] = "http",
    host: Annotated[str, typer.Option(help="address to listen on; others than the loopback's need keys")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8001,
    keys_file: Annotated[
        Path | None, typer.Option(help=f"bearer keys, one a line; {VARIABLE} has them by commas")
    ] = None,
    proxies: Annotated[
        str, typer.Option(help="addresses with X-Forwarded-* headers that are believed, by commas")
    ] = "127.0.0.1",
    caller_sessions: Annotated[
        int, typer.Option(min=1, help="MCP sessions of one key; its longest unused end")
    ] = DEFAULT.per_caller,
    max_sessions: Annotated[int, typer.Option(min=1, help="MCP sessions of all keys")] = DEFAULT.total,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="serve every client that reaches the port")] = False,
) -> None:
    """Serve the python and browser tools as MCP servers: for our replicas and other engines."""
    if transport not in ("http", "stdio"):
        typer.echo(f"error: --transport is http or stdio, not {transport}", err=True)
        raise typer.Exit(2)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")  # on stderr
    logging.getLogger("vllm_gptoss").setLevel(logging.INFO)
    try:
        at = Listening(host, port, keys_file, proxies, no_auth, SessionLimits(caller_sessions, max_sessions))
        asyncio.run(serve_tools(spec, "stdio" if transport == "stdio" else "http", at))
    except ToolConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
