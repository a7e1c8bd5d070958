"""MCP sessions of `tools serve`, bounded for each caller and in total."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_gptoss.tools.service.access import caller_of, identity
from vllm_gptoss.tools.slots import Slots

logger = logging.getLogger(__name__)

_HEADER = "mcp-session-id"
_AT_ONCE, _OPENING_S = 3, 30.0


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Sessions over streamable HTTP and SSE together. Without keys there is one caller, bound by `total`."""

    per_caller: int = 2_000
    total: int = 4_000


DEFAULT = SessionLimits()


class Sessions:
    """ASGI middleware behind the doorkeeper: a new session ends the caller's longest unused one at its limit.

    At the limit of all callers, that of the caller who has most ends. The client of an ended session gets 404, and
    opens a new one. SSE streams end with their connections only: where nothing else can end, the answer is 429.
    """

    def __init__(self, app: ASGIApp, limits: SessionLimits) -> None:
        self._app = app
        self._limits = limits
        self._kept: dict[str, OrderedDict[str, str]] = {}  # caller -> session -> path, the longest unused first
        self._opening = Slots(_AT_ONCE)
        self._held: Counter[str] = Counter()  # by caller: SSE streams, and sessions that are being opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, once there is room for what it opens."""
        if scope["type"] != "http" or not scope["path"].endswith(("/mcp", "/sse")):
            await self._app(scope, receive, send)
            return
        caller = caller_of(HTTPConnection(scope))
        session = Headers(scope=scope).get(_HEADER, "")
        if session in self._kept.get(caller, ()):
            self._kept[caller].move_to_end(session)
        if not session and _opens(scope):
            await self._open(caller, scope, receive, send)
            return
        await self._app(scope, receive, send)
        if scope["method"] == "DELETE":
            self._forget(caller, session)

    async def _open(self, caller: str, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            opened = Headers(raw=message["headers"]).get(_HEADER) if message["type"] == "http.response.start" else None
            if opened and message["status"] < 400:
                self._kept.setdefault(caller, OrderedDict())[opened] = scope["path"]
            await send(message)

        if full := await self._make_room(scope, caller):
            await JSONResponse({"error": full}, 429, {"Retry-After": "5"})(scope, receive, send)
            return
        self._held[caller] += 1
        try:
            async with AsyncExitStack() as turn:
                if scope["method"] == "POST":  # 6 ms of the event loop each
                    await turn.enter_async_context(self._opening.one(caller))
                    await turn.enter_async_context(asyncio.timeout(_OPENING_S))
                await self._app(scope, receive, noted)
        finally:
            self._held[caller] -= 1
            if not self._held[caller]:
                del self._held[caller]

    async def _make_room(self, scope: Scope, caller: str) -> str:
        """Ends sessions until the caller can open one. Returns an empty string, or the reason why it cannot."""
        limits = self._limits
        while caller and self._held[caller] + len(self._kept.get(caller, ())) >= limits.per_caller:
            if caller not in self._kept:
                return f"{limits.per_caller} sessions of this key are open (--caller-sessions)"
            await self._end(scope, caller)
        while self._held.total() + sum(map(len, self._kept.values())) >= limits.total:
            if not self._kept:
                return f"{limits.total} sessions are open (--max-sessions)"
            await self._end(scope, max(self._kept, key=lambda other: len(self._kept[other])))
        return ""

    async def _end(self, scope: Scope, caller: str) -> None:
        session, path = next(iter(self._kept[caller].items()))
        self._forget(caller, session)
        logger.info("tools serve: an unused session of %s ends to make room", caller[:8] or "a client")
        headers = [(name, value) for name, value in scope["headers"] if name == b"host"]
        headers.append((_HEADER.encode(), session.encode()))
        named: Mapping[str, Any] = {"method": "DELETE", "path": path, "raw_path": path.encode(), "headers": headers}
        await self._app({**scope, **named, **identity(caller)}, _nothing, _unread)

    def _forget(self, caller: str, session: str) -> None:
        mine = self._kept.get(caller, OrderedDict())
        mine.pop(session, None)
        if not mine:
            self._kept.pop(caller, None)


def _opens(scope: Scope) -> bool:
    """Whether a request without a session opens one, by the rule of the `mcp` package: requests of protocols that have
    no handshake are complete calls, which run for as long as the tool allows."""
    if scope["path"].endswith("/sse"):
        return bool(scope["method"] == "GET")
    version = Headers(scope=scope).get(MCP_PROTOCOL_VERSION_HEADER)
    return scope["method"] == "POST" and (version is None or version in HANDSHAKE_PROTOCOL_VERSIONS)


async def _nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _unread(message: Message) -> None:
    """Drops the message."""
