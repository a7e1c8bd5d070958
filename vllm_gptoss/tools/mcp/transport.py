"""From a server's configuration to an `mcp.Client`: streamable HTTP, SSE or stdio, with headers, OAuth and guard."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.auth import OAuthClientProvider
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.client.sse import sse_client
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken
from mcp_types import Implementation

from vllm_gptoss.tools.browser.guard import Guard, check_for_proxy, pin, proxy_of
from vllm_gptoss.tools.mcp.settings import McpServerConfig, OAuthConfig, bearer, expand
from vllm_gptoss.version import __version__

_INFO = Implementation(name="vllm-gptoss", version=__version__)
_READ_S = 300.0
"""Seconds an event stream may be silent."""


class _Tokens:
    """Tokens for as long as the process lives; client credentials can always get new ones."""

    def __init__(self) -> None:
        self._tokens: OAuthToken | None = None
        self._client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self._tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self._tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self._client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._client = client_info


class GuardedTransport2(httpx2.AsyncBaseTransport):
    """`browser.guard.GuardedTransport` for the HTTP client that the `mcp` package brings."""

    def __init__(self, guard: Guard, inner: httpx2.AsyncBaseTransport | None = None) -> None:
        self._limits = httpx2.Limits(max_connections=100, max_keepalive_connections=0)
        self._guard = guard
        self._use_proxies = inner is None
        self._inner = inner or httpx2.AsyncHTTPTransport(limits=self._limits, trust_env=False)
        self._proxies: dict[str, httpx2.AsyncBaseTransport] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Judges and sends.

        Raises:
            DeniedError: the address must not be reached; nothing was sent.
        """
        proxy = proxy_of(request.url.scheme, request.url.host) if self._use_proxies else None
        if proxy is None:
            return await self._inner.handle_async_request(await pin(self._guard, request))
        await check_for_proxy(self._guard, request)
        if proxy not in self._proxies:
            self._proxies[proxy] = httpx2.AsyncHTTPTransport(proxy=proxy, limits=self._limits)
        return await self._proxies[proxy].handle_async_request(request)

    async def aclose(self) -> None:
        """Closes every transport."""
        for transport in (self._inner, *self._proxies.values()):
            await transport.aclose()


@dataclass(frozen=True)
class Dialer:
    """Makes clients of one server. Secrets are read when a client is made and are in no repr."""

    config: McpServerConfig
    guard: Guard | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)

    def client(self, on_message: Callable[[Any], Any], on_end: Callable[[], None]) -> Client:
        """A client, not yet connected; `on_end` is told when the server's side of the connection ends.

        Raises:
            MissingVariableError: the configuration names a variable that is not set.
        """
        return Client(
            _ended(self._transport(), on_end),
            mode=self.config.protocol,
            message_handler=on_message,
            client_info=_INFO,
            read_timeout_seconds=self.config.timeout_s,
            cache=None,
        )

    def _transport(self) -> Any:
        config = self.config
        if config.wire == "stdio":
            return stdio_client(self._process())
        url = expand(config.url, self.environ)
        headers = {**bearer(config, self.environ), **self.headers}
        auth = _oauth(url, config.oauth, self.environ) if config.oauth else None
        if config.wire == "sse":
            return sse_client(
                url, headers, config.connect_timeout_s, _READ_S, httpx_client_factory=self._http, auth=auth
            )
        return self._streamable(url, headers, auth)

    def _process(self) -> StdioServerParameters:
        config = self.config
        return StdioServerParameters(
            command=config.command,
            args=[expand(arg, self.environ) for arg in config.args],
            env={name: expand(value, self.environ) for name, value in config.env.items()},
            cwd=config.cwd,
        )

    def _http(
        self,
        headers: dict[str, str] | None = None,
        timeout: httpx2.Timeout | None = None,
        auth: httpx2.Auth | None = None,
    ) -> httpx2.AsyncClient:
        transport = GuardedTransport2(self.guard) if self.guard else None
        return httpx2.AsyncClient(headers=headers, timeout=timeout or 30.0, auth=auth, transport=transport)

    @asynccontextmanager
    async def _streamable(
        self, url: str, headers: dict[str, str], auth: httpx2.Auth | None
    ) -> AsyncIterator[tuple[Any, Any]]:
        timeout = httpx2.Timeout(self.config.connect_timeout_s, read=_READ_S)
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(self._http(headers, timeout, auth))
            yield await stack.enter_async_context(streamable_http_client(url, http_client=http))


def _oauth(url: str, config: OAuthConfig, environ: Mapping[str, str]) -> OAuthClientProvider:
    return ClientCredentialsOAuthProvider(
        url,
        _Tokens(),
        expand(f"${{{config.client_id_env}}}", environ),
        expand(f"${{{config.client_secret_env}}}", environ),
        scope=config.scope,
        issuer=config.issuer,
    )


class _Watched:
    """A read stream that says when it ends."""

    def __init__(self, stream: Any, on_end: Callable[[], None]) -> None:
        self._stream = stream
        self._on_end = on_end

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        try:
            return await self._stream.receive()
        except Exception:
            self._on_end()
            raise

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            self._on_end()
            raise

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> _Watched:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> Any:
        return await self._stream.__aexit__(*exc)


@asynccontextmanager
async def _ended(transport: Any, on_end: Callable[[], None]) -> AsyncIterator[tuple[Any, Any]]:
    async with transport as (read, write):
        yield _Watched(read, on_end), write
