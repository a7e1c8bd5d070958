"""From a server's configuration to an `mcp.Client`: streamable HTTP, SSE or stdio, with headers, OAuth and guard."""

from __future__ import annotations

import errno
import os
import shutil
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import anyio
import httpx2
from anyio.abc import ObjectReceiveStream
from mcp import Client, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import Implementation

from vllm_gptoss.tools.browser.guard import Guard, Guarded
from vllm_gptoss.tools.confined.content import ACCEPT_ENCODING
from vllm_gptoss.tools.mcp.answers import explained, without_broken_tools
from vllm_gptoss.tools.mcp.bounds import MAX_ANSWER_BYTES, bound
from vllm_gptoss.tools.mcp.events import EventsClient
from vllm_gptoss.tools.mcp.oauth import Tokens, authentication
from vllm_gptoss.tools.mcp.pace import FloodError, Pace
from vllm_gptoss.tools.mcp.settings import McpServerConfig, bearer, expand
from vllm_gptoss.tools.version import NAME, VERSION

_INFO = Implementation(name=NAME, version=VERSION)
_PATIENCE_S = 5.0
"""Seconds that a server may send more than its pace in a row."""

_READ_S = 300.0
"""Seconds an event stream may be silent."""

_RELAY = str(Path(__file__).with_name("relay.py"))


class GuardedTransport2(Guarded, httpx2.AsyncBaseTransport):
    library = httpx2


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

    def client(self, on_message: Callable[[Any], Any], on_end: Callable[[str], None]) -> Client:
        """A client, not yet connected; `on_end` gets the reason, or "", when the server's side of it ends. Raises
        MissingVariableError: the configuration names a variable that is not set."""
        return Client(
            _ended(self._transport(), on_end, Pace(self.config.max_unasked_per_s, _PATIENCE_S)),
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
        env = {name: expand(value, self.environ) for name, value in config.env.items()}
        _check_command(config, env)
        arguments = [expand(arg, self.environ) for arg in config.args]
        return StdioServerParameters(
            command=sys.executable,
            args=["-I", _RELAY, str(MAX_ANSWER_BYTES), config.command, *arguments],
            env=env,
            cwd=config.cwd,
        )

    def _http(
        self,
        headers: dict[str, str] | None = None,
        timeout: httpx2.Timeout | None = None,
        auth: httpx2.Auth | None = None,
    ) -> httpx2.AsyncClient:
        kind = EventsClient if self.config.wire == "sse" else httpx2.AsyncClient
        return kind(
            headers={"Accept-Encoding": ACCEPT_ENCODING, **(headers or {})},
            timeout=timeout or 30.0,
            auth=auth,
            verify=trust(self.config.ca_file),
            transport=GuardedTransport2(self.guard) if self.guard else None,
            event_hooks={"request": [self._keep_to_issuer], "response": [bound, self._note, explained]},
        )

    async def _keep_to_issuer(self, request: httpx2.Request) -> None:
        """A server's 401 names the address of its OAuth metadata, which could be any that this process reaches. Raises
        ConnectError: `request` is neither for the server or the issuer, nor for the token endpoint that the issuer's
        own metadata names, which is the only one that gets a form."""
        if self.config.oauth is None or _is_form(request):
            return
        known = [httpx2.URL(url) for url in (expand(self.config.url, self.environ), self.config.oauth.issuer)]
        if not any(_same_origin(request.url, url) for url in known):
            raise httpx2.ConnectError(f"the server requires a request to {request.url}, which is not its issuer's")

    async def _note(self, response: httpx2.Response) -> None:
        # 405 for a GET: the server has no permanent stream.
        if response.status_code >= 400 and (response.status_code, response.request.method) != (405, "GET"):
            self.refused[:] = [*self.refused[-9:], response.status_code]

    @asynccontextmanager
    async def _streamable(
        self, url: str, headers: dict[str, str], auth: httpx2.Auth | None
    ) -> AsyncIterator[tuple[Any, Any]]:
        timeout = httpx2.Timeout(self.config.connect_timeout_s, read=_READ_S)
        async with (
            self._http(headers, timeout, auth) as http,
            streamable_http_client(url, http_client=http, max_sse_event_size=MAX_ANSWER_BYTES) as streams,
        ):
            yield streams


def _is_form(request: httpx2.Request) -> bool:
    kind: str = request.headers.get("content-type", "")
    return request.method == "POST" and kind.startswith("application/x-www-form-urlencoded")


def _same_origin(one: httpx2.URL, other: httpx2.URL) -> bool:
    ports = {"http": 80, "https": 443}
    mine, theirs = ((url.scheme, url.host, url.port or ports.get(url.scheme)) for url in (one, other))
    return bool(mine == theirs)


def _check_command(config: McpServerConfig, env: Mapping[str, str]) -> None:
    """Raises FileNotFoundError where the relay would find no such program."""
    relative = "/" in config.command and not os.path.isabs(config.command)
    command = os.path.join(config.cwd or ".", config.command) if relative else config.command
    if shutil.which(command, path=env.get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), config.command)


def trust(ca_file: Path | None) -> ssl.SSLContext:
    """The context with the trusted certificates, read again when one of their files changes."""
    named = [str(ca_file or ""), os.environ.get("SSL_CERT_FILE", ""), os.environ.get("SSL_CERT_DIR", "")]
    return _context(ca_file, tuple((name, _changed(name)) for name in named))


def _changed(name: str) -> int:
    try:
        return os.stat(name).st_mtime_ns if name else 0
    except OSError:
        return 0


@lru_cache(maxsize=32)
def _context(ca_file: Path | None, read_from: tuple[tuple[str, int], ...]) -> ssl.SSLContext:
    # Reading the usual certificates keeps the event loop for about 35 ms (one core): not for each conversation.
    # `read_from` is only part of the cache's key.
    context: ssl.SSLContext = httpx2.create_ssl_context()
    if ca_file is not None:
        context.load_verify_locations(cafile=ca_file)
    return context


class _Watched(ObjectReceiveStream[Any]):
    """A read stream at a bounded pace that reports its end, and drops malformed tools from listings."""

    def __init__(self, stream: Any, on_end: Callable[[str], None], pace: Pace) -> None:
        self._stream = stream
        self._on_end = on_end
        self._pace = pace

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        try:
            message = await self._stream.receive()
            await self._pace.take(message)
            return without_broken_tools(message)
        except FloodError as error:
            self._on_end(str(error))
            raise anyio.EndOfStream from None
        except Exception:
            self._on_end("")
            raise

    async def aclose(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def _ended(transport: Any, on_end: Callable[[str], None], pace: Pace) -> AsyncIterator[tuple[Any, Any]]:
    async with transport as (read, write):
        yield _Watched(read, on_end, pace), write
