"""Servers that requests name: only allowed hosts, and what a request brings in secret stays with it."""

from __future__ import annotations

import asyncio
import logging

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tests.support.servers import example, running
from vllm_gptoss.tools.config import RemoteConfig, ToolsPlan
from vllm_gptoss.tools.mcp.provider import McpProvider
from vllm_gptoss.tools.protocol import SessionOptions, ToolCall, ToolResult, ToolSession
from vllm_gptoss.tools.server import NotAllowedError, ToolServer


async def do(session: ToolSession, namespace: str, tool: str | None, arguments: str) -> ToolResult:
    return await session.call(ToolCall("call_1", namespace, tool, arguments))


def remote(*hosts: str) -> ToolServer:
    return ToolServer([], ToolsPlan(requests=RemoteConfig(allowed_hosts=list(hosts), connect_timeout_s=5.0)))


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example/mcp", "http://127.0.0.1:9/mcp", "ftp://allowed.example/", "https://u:p@allowed.example/mcp",
        "", "https://allowed.example.evil.example/mcp", "https://evil.example/allowed.example", "https://sub.allowed.example/",
        "http://[::1/", "https://allowed.example:99999999/", "https://${HOME}.allowed.example/",
    ],
)  # fmt: skip
async def test_a_request_reaches_only_allowed_hosts(url: str) -> None:
    with pytest.raises(NotAllowedError):
        await remote("allowed.example").remote({"server_label": "x", "server_url": url})


async def test_without_a_list_no_request_reaches_any_server() -> None:
    with pytest.raises(NotAllowedError, match="GPTOSS_MCP_ALLOWED_HOSTS"):
        await remote().remote({"server_label": "x", "server_url": "https://mcp.example/mcp"})


@pytest.mark.parametrize(
    ("allowed", "url"),
    [("[::1]:1", "http://[::1]:1/mcp"), ("::1", "http://[0:0::1]:1/mcp"), ("LOCALHOST.", "http://localhost:1/mcp")],
)
async def test_an_allowed_host_is_dialled_however_it_is_written(allowed: str, url: str) -> None:
    provider = await remote(allowed).remote({"server_label": "x", "server_url": url})
    assert "ConnectError" in str(provider.unavailable)  # dialled, and nothing listens
    await provider.aclose()


async def test_a_wildcard_does_not_open_private_addresses() -> None:
    provider = await remote("*.localhost").remote({"server_label": "x", "server_url": "http://a.localhost:1/mcp"})
    assert "DeniedError" in str(provider.unavailable)  # the guard's word, before anything was sent
    await provider.aclose()


async def test_a_requests_server_works_and_its_authorization_is_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with example("streamable_http") as (url, _):
        host = url.split("/")[2]
        tool = {
            "type": "mcp",
            "server_label": "mine",
            "server_url": url,
            "authorization": "tok-SECRET",
            "headers": {"X-Plan": "gold-SECRET"},
        }
        provider = await remote(host).remote(tool)
        assert provider.unavailable is None
        assert provider.namespaces()[0].name == "mine"
        assert not provider.needs_approval("add")  # the request decides, and its default is approval
        assert caplog.records
        assert "SECRET" not in caplog.text  # what the mcp package and its HTTP client log at DEBUG included
        session = await provider.open("c", SessionOptions(allowed_tools=["header"]))
        seen = await do(session, "mine", "header", '{"name": "authorization"}')
        assert seen.text == "Bearer tok-SECRET"
        assert (await do(session, "mine", "header", '{"name": "x-plan"}')).text == "gold-SECRET"
        hidden = await do(session, "mine", "add", '{"a": 1}')
        assert hidden.error.type == "unknown_tool"
        await session.aclose()
        await provider.aclose()
        lines = [r.getMessage() for r in caplog.records if r.name.startswith("vllm_gptoss")]
        inner = provider.inner
        assert isinstance(inner, McpProvider)
        assert "SECRET" not in "\n".join(lines) + repr(inner.config) + repr(inner._dialer) + repr(inner)
    with pytest.raises(NotAllowedError, match="header Host"):
        await remote(host).remote({**tool, "headers": {"Host": "x"}})


@pytest.mark.parametrize("secret", ["SECRET\nX-Admin: 1", "SECRET\x00", "SECR\u00c9T", "SECRET\u2028"])
async def test_an_authorization_that_http_cannot_carry_is_refused_and_not_shown(
    secret: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for given in ({"authorization": secret}, {"headers": {"X-Key": secret}}, {"headers": {secret: "x"}}):
        with pytest.raises(NotAllowedError, match="HTTP does not allow") as caught:
            await remote("127.0.0.1").remote({"server_label": "x", "server_url": "http://127.0.0.1:1/mcp", **given})
        if "headers" not in given:
            assert "SECR" not in str(caught.value)
    assert "SECR" not in caplog.text


@pytest.mark.parametrize("status", [302, 307, 308])
async def test_a_redirect_to_another_server_is_not_followed_and_learns_no_secret(status: int) -> None:
    """The operator allowed the host with any port; the server that a request names is still one origin."""
    asked: list[dict[str, str]] = []

    async def inside(request: Request) -> Response:
        asked.append(dict(request.headers))
        return Response(status_code=404)

    every = ["GET", "POST", "DELETE"]
    async with running(Starlette(routes=[Route("/{p:path}", inside, methods=every)])) as other:

        async def leads_away(request: Request) -> Response:
            return RedirectResponse(f"{other}/mcp", status)

        async with running(Starlette(routes=[Route("/{p:path}", leads_away, methods=every)])) as url:
            for path in ("/mcp", "/sse"):
                tool = {"server_label": "x", "server_url": url + path, "authorization": "tok"}
                provider = await remote("127.0.0.1").remote(tool)
                assert provider.unavailable is not None
                await provider.aclose()
    assert asked == []


async def test_a_request_that_is_dropped_while_its_server_is_dialled_leaves_no_connection() -> None:
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    tool = {"server_label": "x", "server_url": f"http://127.0.0.1:{port}/mcp"}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await remote("127.0.0.1").remote(tool)
    silent.close()
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("mcp ")] == []


async def test_an_authorization_read_from_a_file_with_its_line_break_works() -> None:
    with example("streamable_http") as (url, _):
        tool = {"server_label": "mine", "server_url": url, "authorization": "tok\n"}
        provider = await remote(url.split("/")[2]).remote(tool)
        session = await provider.open("c", SessionOptions())
        assert (await do(session, "mine", "header", '{"name": "authorization"}')).text == "Bearer tok"
        await provider.aclose()
