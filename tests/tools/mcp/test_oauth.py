"""A protected MCP server and its authorization server, both real and local: tokens are got, used, renewed, hidden."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import MCPServer
from pydantic import AnyHttpUrl
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.servers import running
from vllm_gptoss.tools.mcp.provider import McpProvider
from vllm_gptoss.tools.mcp.settings import McpServerConfig
from vllm_gptoss.tools.mcp.transport import Dialer
from vllm_gptoss.tools.protocol import SessionOptions, ToolCall

ENVIRON = {"ID": "client-1", "SECRET": "s3cret"}


class Issuer:
    """An OAuth authorization server for client credentials (RFC 6749 §4.4, metadata of RFC 8414)."""

    def __init__(self) -> None:
        self.url = ""
        self.issued: list[str] = []
        self.refused = 0
        self.lifetime = 3600
        self.refresh = ""  # the one refresh token that is good now; each use replaces it

    async def metadata(self, request: Request) -> Response:
        return JSONResponse(
            {
                "issuer": self.url,
                "authorization_endpoint": f"{self.url}authorize",
                "token_endpoint": f"{self.url}token",
                "response_types_supported": ["code"],
                "grant_types_supported": ["client_credentials"],
                "token_endpoint_auth_methods_supported": ["client_secret_basic"],
            }
        )

    async def token(self, request: Request) -> Response:
        expected = "Basic " + base64.b64encode(b"client-1:s3cret").decode()
        form = await request.form()
        if self.refresh:
            return self._renewed(dict(form), request.headers.get("authorization"))
        if request.headers.get("authorization") != expected or form["grant_type"] != "client_credentials":
            self.refused += 1
            return JSONResponse({"error": "invalid_client"}, 401)
        self.issued.append(f"token-{len(self.issued)}")
        return JSONResponse(
            {"access_token": self.issued[-1], "token_type": "Bearer", "expires_in": self.lifetime, "scope": "tools"}
        )

    def _renewed(self, form: dict[str, Any], authorization: str | None) -> Response:
        wanted = {"grant_type": "refresh_token", "refresh_token": self.refresh, "client_id": "client-1"}
        if authorization or {name: form.get(name) for name in wanted} != wanted:
            self.refused += 1
            return JSONResponse({"error": "invalid_grant"}, 400)
        self.issued.append(f"token-{len(self.issued)}")
        self.refresh += "+"
        answer = {"access_token": self.issued[-1], "token_type": "Bearer", "expires_in": self.lifetime}
        return JSONResponse({**answer, "refresh_token": self.refresh})

    async def verify_token(self, token: str) -> AccessToken | None:
        if token not in self.issued:
            return None
        return AccessToken(token=token, client_id="client-1", scopes=["tools"], expires_at=int(time.time()) + 3600)


@asynccontextmanager
async def protected(issuer: Issuer) -> AsyncIterator[str]:
    routes = [
        Route("/.well-known/oauth-authorization-server", issuer.metadata),
        Route("/token", issuer.token, methods=["POST"]),
    ]
    async with running(Starlette(routes=routes)) as base:
        issuer.url = f"{base}/"  # as pydantic writes it into the server's metadata; issuers are compared exactly
        server: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await server[0](scope, receive, send)

        async with running(app) as url:
            auth = AuthSettings(
                issuer_url=AnyHttpUrl(issuer.url),
                resource_server_url=AnyHttpUrl(f"{url}/mcp"),
                required_scopes=["tools"],
                validate_token_resource=False,
            )
            mcp = MCPServer("vault", auth=auth, token_verifier=issuer, log_level="CRITICAL")

            @mcp.tool(structured_output=False)
            def read() -> str:
                return "treasure"

            server.append(mcp.streamable_http_app())
            async with server[0].router.lifespan_context(server[0]):
                yield f"{url}/mcp"


def provider(url: str, issuer: str, environ: dict[str, str]) -> McpProvider:
    config = McpServerConfig.model_validate(
        {
            "url": url,
            "connect_timeout_s": 5.0,
            "oauth": {"client_id_env": "ID", "client_secret_env": "SECRET", "issuer": issuer, "scope": "tools"},
        }
    )
    return McpProvider("", config, Dialer(config, environ=environ))


async def test_credentials_from_the_environment_open_a_protected_server(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    issuer = Issuer()
    async with protected(issuer) as url:
        vault = provider(url, issuer.url, ENVIRON)
        await vault.start()
        assert vault.unavailable is None
        session = await vault.open("c", SessionOptions())
        assert (await session.call(ToolCall("1", "vault", "read", "{}"))).text == "treasure"
        await vault.aclose()
        assert issuer.issued == ["token-0"]
        ours = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("vllm_gptoss"))
        assert "s3cret" not in caplog.text + repr(vault.config)
        assert "token-0" not in ours


async def test_an_expired_token_is_renewed() -> None:
    issuer = Issuer()
    issuer.lifetime = 0
    async with protected(issuer) as url:
        vault = provider(url, issuer.url, ENVIRON)
        await vault.start()
        session = await vault.open("c", SessionOptions())
        assert (await session.call(ToolCall("1", "vault", "read", "{}"))).text == "treasure"
        assert len(issuer.issued) > 1
        await vault.aclose()


@pytest.mark.parametrize("wrong", ["secret", "issuer"])
async def test_refused_credentials_turn_the_tool_off_and_go_nowhere_else(wrong: str) -> None:
    issuer = Issuer()
    async with protected(issuer) as url:
        environ = {**ENVIRON, "SECRET": "no"} if wrong == "secret" else ENVIRON
        vault = provider(url, issuer.url if wrong == "secret" else "https://issuer.example", environ)
        await vault.start()
        assert vault.unavailable is not None
        assert "s3cret" not in vault.unavailable
        assert issuer.issued == []
        assert issuer.refused == (1 if wrong == "secret" else 0)  # credentials of another issuer are not sent at all
        await vault.aclose()


async def test_a_401_makes_us_ask_nobody_but_the_server_and_its_issuer() -> None:
    asked: list[str] = []

    async def inside(request: Request) -> Response:
        asked.append(f"{request.method} {request.url.path}")
        return JSONResponse({"resource": f"{request.base_url}mcp", "authorization_servers": [str(request.base_url)]})

    async with running(Starlette(routes=[Route("/{path:path}", inside, methods=["GET", "POST"])])) as elsewhere:

        async def refuse(request: Request) -> Response:
            where = f'Bearer resource_metadata="{elsewhere}/latest/meta-data"'
            return JSONResponse({}, 401, {"WWW-Authenticate": where})

        async with running(Starlette(routes=[Route("/{path:path}", refuse, methods=["GET", "POST"])])) as url:
            vault = provider(f"{url}/mcp", "http://127.0.0.1:1/", ENVIRON)
            await vault.start()
            assert asked == []
            assert "not its issuer's" in str(vault.unavailable)
            await vault.aclose()


async def test_a_refresh_token_opens_it_too_and_its_replacements_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    issuer = Issuer()
    issuer.refresh = "first-r3fresh"
    async with protected(issuer) as url:
        config = McpServerConfig.model_validate(
            {
                "url": url,
                "connect_timeout_s": 5.0,
                "connections": "per_conversation",
                "oauth": {"client_id_env": "ID", "refresh_token_env": "REFRESH", "issuer": issuer.url},
            }
        )
        # A public client, and a variable that was read from a file with its line break.
        vault = McpProvider("", config, Dialer(config, environ={"ID": "client-1", "REFRESH": "first-r3fresh\n"}))
        await vault.start()
        assert vault.unavailable is None
        for number in range(2):
            session = await vault.open(f"c{number}", SessionOptions())
            assert (await session.call(ToolCall("1", "vault", "read", "{}"))).text == "treasure"
            await session.aclose()
        assert issuer.issued == ["token-0"]  # conversations share the token, though not the connection
        issuer.issued[0] = "withdrawn"
        session = await vault.open("later", SessionOptions())
        assert (await session.call(ToolCall("1", "vault", "read", "{}"))).text == "treasure"
        assert (issuer.issued[-1], issuer.refused) == ("token-1", 0)
        await vault.aclose()
    ours = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("vllm_gptoss"))
    assert "the refresh token in $REFRESH was replaced" in ours
    assert "r3fresh" not in ours
