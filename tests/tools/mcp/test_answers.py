"""HTTP as servers really answer it: a status keeps its meaning, one broken tool costs itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.servers import running
from vllm_gptoss.tools.mcp.provider import McpProvider
from vllm_gptoss.tools.mcp.settings import McpServerConfig
from vllm_gptoss.tools.protocol import SessionOptions, ToolCall, ToolResult

INITIALIZED = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "raw", "version": "1"},
}
GOOD = {"name": "add", "inputSchema": {"type": "object"}}


@asynccontextmanager
async def raw(call: Response | None = None, tools: Any = (GOOD,)) -> AsyncIterator[McpProvider]:
    """A started provider of a server with scripted answers; it answers a call with `call`."""

    async def answer(request: Request) -> Response:
        asked = await request.json() if request.method == "POST" else {}
        method, id_ = asked.get("method"), asked.get("id")
        if request.method != "POST":
            return Response(status_code=405)
        if id_ is None:
            return Response(status_code=202)
        results = {"initialize": INITIALIZED, "tools/list": {"tools": list(tools)}}
        if method == "tools/call" and call is not None:
            return call
        if method not in results:
            return JSONResponse({"jsonrpc": "2.0", "id": id_, "error": {"code": -32601, "message": "no"}})
        return JSONResponse({"jsonrpc": "2.0", "id": id_, "result": results[method]})

    async with running(Starlette(routes=[Route("/mcp", answer, methods=["GET", "POST", "DELETE"])])) as url:
        provider = McpProvider("raw", McpServerConfig(url=f"{url}/mcp", connect_timeout_s=20))
        async with aclosing(provider):
            await provider.start()
            yield provider


async def called(provider: McpProvider) -> ToolResult:
    async with aclosing(await provider.open("c", SessionOptions())) as session:
        return await session.call(ToolCall("1", "raw", "add", "{}"))


class Events:
    """A server of the old SSE transport that answers the POST of a call as scripted; later calls it takes."""

    def __init__(self, call: Response | None) -> None:
        self.call = call
        self.said: asyncio.Queue[str] = asyncio.Queue()

    async def stream(self, request: Request) -> Response:
        async def events() -> AsyncIterator[str]:
            yield "event: endpoint\r\ndata: /messages\r\n\r\n"
            while True:
                yield f"event: message\r\ndata: {await self.said.get()}\r\n\r\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def take(self, request: Request) -> Response:
        asked = await request.json()
        results: dict[str, Any] = {
            "initialize": INITIALIZED,
            "tools/list": {"tools": [GOOD]},
            "tools/call": {"content": [{"type": "text", "text": "2"}]},
        }
        if asked.get("method") == "tools/call" and self.call is not None:
            call, self.call = self.call, None
            return call
        if "id" in asked:
            known = results.get(asked["method"])
            said = {"result": known} if known else {"error": {"code": -32601, "message": "no"}}
            self.said.put_nowait(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **said}))
        return Response(status_code=202)


@asynccontextmanager
async def old(call: Response | None) -> AsyncIterator[McpProvider]:
    """A started provider of such a server, with one connection for all."""
    events = Events(call)
    routes = [Route("/sse", events.stream), Route("/messages", events.take, methods=["POST"])]
    async with running(Starlette(routes=routes)) as url:
        config = McpServerConfig(url=f"{url}/sse", transport="sse", connections="shared", connect_timeout_s=20)
        provider = McpProvider("raw", config)
        async with aclosing(provider):
            await provider.start()
            yield provider


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (401, "denied", "HTTP 401: its credentials are missing or wrong"),
        (403, "denied", "HTTP 403: its credentials do not allow this"),
        (429, "unavailable", "HTTP 429: too many requests; try again in 7 s"),
        (500, "tool_failed", "HTTP 500: the server failed"),
        (503, "unavailable", "HTTP 503: the server failed"),
        (599, "tool_failed", "HTTP 599: the server failed"),
        (418, "tool_failed", "HTTP 418: I'm a Teapot"),
        (499, "tool_failed", "HTTP 499: the server refused it"),
    ],
)
@pytest.mark.parametrize(
    ("server", "body"),
    [(raw, ""), (raw, "<h1>no</h1>"), (raw, '{"detail": "no"}'), (raw, "{"), (old, ""), (old, '{"detail": "no"}')],
)
async def test_every_status_of_a_refused_call_reads_differently(
    server: Any, status: int, kind: str, said: str, body: str
) -> None:
    """Over SSE the answers come elsewhere: a refused POST left the call, and every later one, to their timeouts."""
    headers = {"Retry-After": "7"} if status == 429 else {}
    media_type = "application/json" if server is old or body.startswith("{") else None
    async with server(Response(body, status, headers, media_type)) as provider, asyncio.timeout(20):
        assert provider.unavailable is None
        result = await called(provider)
        assert result.error.type == kind
        assert f"refused the call: {said}" in result.text
        assert provider.unavailable is None  # a refused call is no lost connection
        if server is old:
            assert (await called(provider)).text == "2"


async def test_a_json_rpc_error_says_more_than_its_status() -> None:
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": -32602, "message": "the city is missing"}}
    async with raw(JSONResponse(error, 400)) as provider:
        result = await called(provider)
    assert "the city is missing" in result.text
    assert "HTTP 400" not in result.text


@pytest.mark.parametrize(
    "broken",
    [
        {"name": "bad", "inputSchema": True},
        {"name": "bad"},
        {"inputSchema": {"type": "object"}},
        {"name": "bad", "inputSchema": {"type": "object"}, "annotations": []},
        {"name": 7, "inputSchema": {}},
        "bad",
        None,
    ],
)
async def test_one_broken_tool_costs_itself(broken: Any, caplog: pytest.LogCaptureFixture) -> None:
    ok = JSONResponse({"jsonrpc": "2.0", "id": 3, "result": {"content": [{"type": "text", "text": "2"}]}})
    async with raw(ok, [broken, GOOD]) as provider:
        assert provider.unavailable is None
        assert [tool.name for tool in provider.namespaces()[0].tools] == ["add"]
        assert "is left out" in caplog.text


class Restless:
    """A server that constantly reports changed tools, to be listed again at once."""

    def __init__(self) -> None:
        self.listed = self.opened = 0

    async def answer(self, request: Request) -> Response:
        if request.method == "GET":
            self.opened += 1
            return StreamingResponse(self.events(), media_type="text/event-stream")
        asked = await request.json() if request.method == "POST" else {}
        self.listed += asked.get("method") == "tools/list"
        if asked.get("id") is None:
            return Response(status_code=202)
        if asked["method"] not in ("initialize", "tools/list"):
            return JSONResponse({"jsonrpc": "2.0", "id": asked["id"], "error": {"code": -32601, "message": "no"}})
        result = {"tools": [GOOD]}
        if asked["method"] == "initialize":
            tools, info = {"tools": {"listChanged": True}}, {"name": "raw", "version": "1"}
            result = {"protocolVersion": "2025-06-18", "capabilities": tools, "serverInfo": info}
        answer = {"jsonrpc": "2.0", "id": asked["id"], "result": result}
        return JSONResponse(answer, headers={"Mcp-Session-Id": "one"})

    async def events(self) -> AsyncIterator[str]:
        changed = json.dumps({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
        for number in range(50):
            yield f"retry: 0\r\nid: {number}\r\nevent: message\r\ndata: {changed}\r\n\r\n"
            await asyncio.sleep(0.002)


async def test_a_restless_server_is_asked_once_a_second() -> None:
    server = Restless()
    routes = [Route("/mcp", server.answer, methods=["GET", "POST", "DELETE"])]
    async with running(Starlette(routes=routes)) as url:
        provider = McpProvider("raw", McpServerConfig(url=f"{url}/mcp", connect_timeout_s=20))
        await provider.start()
        assert provider.unavailable is None
        server.listed = server.opened = 0
        await asyncio.sleep(3.0)
        assert 1 <= server.listed <= 5
        assert 1 <= server.opened <= 5
        await provider.aclose()
