"""From a server's configuration to an `mcp.Client`: streamable HTTP, SSE or stdio, with headers, OAuth and guard."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import Implementation

from vllm_gptoss.tools.browser.guard import Guard, check_for_proxy, proxy_of, send_judged
from vllm_gptoss.tools.mcp.oauth import Tokens, authentication
from vllm_gptoss.tools.mcp.settings import McpServerConfig, bearer, expand
from vllm_gptoss.version import __version__

_INFO = Implementation(name="vllm-gptoss", version=__version__)
_UNREACHABLE = (httpx2.ConnectError, httpx2.ConnectTimeout)
_READ_S = 300.0
"""Seconds an event stream may be silent."""


MAX_ANSWER_BYTES = 16 << 20
"""One answer over streamable HTTP: an image of 10 MB fits in base64; what is larger breaks the connection."""


class GuardedTransport2(httpx2.AsyncBaseTransport):
    """`browser.guard.GuardedTransport` for the HTTP client that the `mcp` package brings."""

    def __init__(self, guard: Guard, inner: httpx2.AsyncBaseTransport | None = None) -> None:
        self._limits = httpx2.Limits(max_connections=100, max_keepalive_connections=0)
        self._guard = guard
        self._use_proxies = inner is None
        self._inner = inner or httpx2.AsyncHTTPTransport(limits=self._limits)
        self._proxies: dict[str, httpx2.AsyncBaseTransport] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Judges and sends.

        Raises:
            DeniedError: the address must not be reached; nothing was sent.
        """
        proxy = proxy_of(request.url.scheme, request.url.host) if self._use_proxies else None
        if proxy is None:
            response: httpx2.Response = await send_judged(self._guard, request, self._inner, _UNREACHABLE)
            return response
        await check_for_proxy(self._guard, request)
        if proxy not in self._proxies:
            try:
                self._proxies[proxy] = httpx2.AsyncHTTPTransport(proxy=proxy, limits=self._limits)
            except ValueError as error:
                raise httpx2.ConnectError(f"the proxy that the environment names cannot be used: {error}") from error
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
    tokens: Tokens = field(default_factory=Tokens, repr=False)
    refused: list[int] = field(default_factory=list, repr=False)
    """HTTP error statuses since it was last cleared: the `mcp` package's errors leave them out."""

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
        auth = authentication(url, config.oauth, self.environ, self.tokens) if config.oauth else None
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
        return httpx2.AsyncClient(
            headers=headers,
            timeout=timeout or 30.0,
            auth=auth,
            verify=_trust(self.config.ca_file),
            transport=GuardedTransport2(self.guard) if self.guard else None,
            event_hooks={"response": [_bound, self._note]},
        )

    async def _note(self, response: httpx2.Response) -> None:
        if response.status_code >= 400:
            self.refused[:] = [*self.refused[-9:], response.status_code]

    @asynccontextmanager
    async def _streamable(
        self, url: str, headers: dict[str, str], auth: httpx2.Auth | None
    ) -> AsyncIterator[tuple[Any, Any]]:
        timeout = httpx2.Timeout(self.config.connect_timeout_s, read=_READ_S)
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(self._http(headers, timeout, auth))
            transport = streamable_http_client(url, http_client=http, max_sse_event_size=MAX_ANSWER_BYTES)
            yield await stack.enter_async_context(transport)


def _trust(ca_file: Path | None) -> ssl.SSLContext | bool:
    if ca_file is None:
        return True
    context: ssl.SSLContext = httpx2.create_ssl_context()
    context.load_verify_locations(cafile=ca_file)
    return context


async def _bound(response: httpx2.Response) -> None:
    """Event streams are bounded by the `mcp` package, event by event; other bodies are not."""
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        response.stream = _Bounded(response.stream)


class _Bounded(httpx2.AsyncByteStream):
    """A body that ends with an error where it is too large to be a tool's answer."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for chunk in self._inner:
            read += len(chunk)
            if read > MAX_ANSWER_BYTES:
                raise httpx2.ReadError(f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


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
