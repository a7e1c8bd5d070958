"""A pinned address must not weaken TLS: the certificate is still checked against the requested name."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from mcp.server.mcpserver import MCPServer
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.support.certificates import certificate
from tests.support.servers import running
from vllm_gptoss.tools.browser.fetch import Fetcher
from vllm_gptoss.tools.browser.guard import Guard, GuardedTransport
from vllm_gptoss.tools.mcp.provider import McpProvider
from vllm_gptoss.tools.mcp.settings import McpServerConfig
from vllm_gptoss.tools.mcp.transport import Dialer


async def to_loopback(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


@pytest.mark.parametrize(("asked", "passes"), [("site.example", True), ("other.example", False)])
async def test_the_certificate_is_checked_against_the_name(tmp_path: Path, asked: str, passes: bool) -> None:
    cert, key = certificate(tmp_path, "site.example")
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse(request.headers["host"]))])
    async with running(app, ssl_certfile=cert, ssl_keyfile=key) as url:
        port = url.rsplit(":", 1)[1]
        guard = Guard([f"{asked}:{port}"], to_loopback)
        inner = httpx.AsyncHTTPTransport(verify=ssl.create_default_context(cafile=cert), trust_env=False)
        async with httpx.AsyncClient(transport=GuardedTransport(guard, inner)) as client:
            if passes:
                assert (await client.get(f"https://{asked}:{port}/")).text == f"{asked}:{port}"
            else:
                with pytest.raises(httpx.ConnectError, match="[Hh]ostname mismatch"):
                    await client.get(f"https://{asked}:{port}/")


async def test_the_operators_own_authority_is_trusted_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path, "localhost")
    server = MCPServer("tickets", log_level="CRITICAL")
    app = server.streamable_http_app()
    app.router.routes.append(Route("/page", lambda request: PlainTextResponse("a page")))
    async with running(app, ssl_certfile=cert, ssl_keyfile=key) as url:
        url = url.replace("http://127.0.0.1", "https://localhost")
        for ca_file, passes in ((None, False), (Path(cert), True)):
            provider = McpProvider("", McpServerConfig(url=f"{url}/mcp", ca_file=ca_file, connect_timeout_s=5.0))
            await provider.start()
            assert (provider.name == "tickets") is passes, provider.unavailable
            await provider.aclose()
        monkeypatch.setenv("SSL_CERT_FILE", cert)  # as for every program of the machine: pages, and requests' servers
        guard = Guard(["localhost"])
        reader = Fetcher(guard, respect_robots=False)
        assert "a page" in (await reader.page(f"{url}/page")).text
        await reader.aclose()
        config = McpServerConfig(url=f"{url}/mcp", connect_timeout_s=5.0)
        provider = McpProvider("", config, Dialer(config, guard))
        await provider.start()
        assert provider.name == "tickets", provider.unavailable
        await provider.aclose()
