"""One connection to an MCP server, owned by one task: it connects, lists tools, sees the end, and tries again.

The `mcp` client must be entered and left by the same task, and a call may come from any; so the task owns the client
and callers borrow it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import mcp_types as types
from mcp import Client, MCPError
from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT
from pydantic import BaseModel, ValidationError

from vllm_gptoss.tools.mcp.transport import Dialer

logger = logging.getLogger(__name__)

_URL = re.compile(r"https?://[^\s'\"<>]+")
_FIRST_DELAY_S = 0.5
_LAST_DELAY_S = 60.0
_CLOSE_S = 8.0  # the stdio transport alone may take 3 x 2 s to end a stubborn process
_MAX_PAGES = 100
_LISTING_EVERY_S, _LISTING_SHARE = 1.0, 20  # listing takes at most a twentieth of the time
_MAX_TOOLS = 1_000
_UNANSWERED = 2
"""Timeouts in a row after which a stdio process counts as stuck: unlike HTTP, one blocked pipe blocks every call."""


class ServerUnavailableError(Exception):
    """There is no connection, and nothing was sent; the message has the reason."""


class ConnectionLostError(Exception):
    """The connection ended during a call, which may or may not have run."""


class SlowError(Exception):
    """The server did not answer in time, and the call was cancelled."""


@dataclass(frozen=True, slots=True)
class Listing:
    name: str
    instructions: str
    tools: Sequence[types.Tool]
    hidden: frozenset[str]  # tools annotated with include_in_prompt: false
    protocol: str
    listed_at: float


class _RawTools(BaseModel, extra="allow"):
    """tools/list as it came: the typed result drops annotations it does not know, such as include_in_prompt."""

    tools: list[dict[str, Any]] = []


class Connection:
    """Connects on `start` and stays connected until `aclose`, unless `reconnect` is off."""

    def __init__(
        self,
        label: str,
        dialer: Dialer,
        *,
        reconnect: bool = True,
        on_listing: Callable[[Listing], None] = lambda listing: None,
    ) -> None:
        self.label = label
        self.listing: Listing | None = None
        self.problem: str | None = "not connected yet"
        self._dialer = dialer
        self._reconnect = reconnect
        self._on_listing = on_listing
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()  # tools/list_changed, a listing too old, or the end
        self._ended = asyncio.Event()
        self._settled = asyncio.Event()  # an attempt has succeeded or failed
        self._tried_at = 0.0
        self._listed_at = 0.0
        self._unanswered = 0
        self._closing = False
        self._floods = ""  # why the last connection was ended, where it sent too much
        self._listing_s = 0.0
        self._reported: str | None = None  # the last problem logged; the same one is not logged again

    @property
    def up(self) -> bool:
        return self._client is not None

    async def start(self) -> None:
        """Makes the first attempt and returns when it is over, successful or not (`problem`)."""
        self._task = asyncio.create_task(self._run(), name=f"mcp {self.label}")
        await self._settled.wait()

    async def aclose(self) -> None:
        """Disconnects, within 8 s in every case."""
        if self._task is None:
            return
        self._closing = True  # the client may answer a cancellation with another error
        self._task.cancel()
        _, pending = await asyncio.wait([self._task], timeout=_CLOSE_S)
        if pending:
            logger.warning("mcp %s: the connection did not close within %.0f s; leaving it", self.label, _CLOSE_S)

    def refresh(self) -> None:
        """Lists the tools again, in the background."""
        self._changed.set()

    async def call(self, tool: str, arguments: dict[str, Any], meta: dict[str, Any], timeout_s: float) -> Any:
        """The server's `CallToolResult`.

        Raises:
            ServerUnavailableError: nothing was sent.
            ConnectionLostError: the connection ended during the call.
            SlowError: no answer in `timeout_s`.
            MCPError: the server refused the call.
        """
        client = await self._connected()
        ended = asyncio.create_task(self._ended.wait())
        request: Any = client.call_tool(tool, arguments, timeout_s, meta=meta or None)  # type: ignore[arg-type]
        call = asyncio.create_task(request)
        try:
            await asyncio.wait([call, ended], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():  # the transport ended and nothing else would end this call
                await asyncio.wait([call], timeout=1.0)
            if not call.done():
                raise ConnectionLostError("the connection to the server ended")
            answer = await call
            self._unanswered = 0
            return answer
        except MCPError as error:
            raise self._translated(error, timeout_s) from error
        except ValidationError as error:
            raise RuntimeError(f"{error.error_count()} parts of it break the protocol") from error
        except (ConnectionLostError, RuntimeError):
            raise
        except Exception as error:
            self._end(describe(error))
            raise ConnectionLostError(describe(error)) from error
        finally:
            for task in (call, ended):
                task.cancel()
            await asyncio.gather(call, ended, return_exceptions=True)

    def _translated(self, error: Any, timeout_s: float) -> Exception:
        if error.error.code == REQUEST_TIMEOUT:
            self._unanswered += 1
            if self._unanswered >= _UNANSWERED and self._dialer.config.wire == "stdio":
                self._end(f"{_UNANSWERED} calls in a row without an answer; starting the process again")
            return SlowError(f"no answer within {timeout_s:.0f} s")
        if error.error.code == CONNECTION_CLOSED or error.error.message == "Session terminated":
            self._end(error.error.message)
            return ConnectionLostError(error.error.message)
        other: Exception = error
        return other

    async def _connected(self) -> Client:
        if self._client is None and self._task is not None and not self._task.done():
            if time.monotonic() - self._tried_at > 1.0 or not self._settled.is_set():
                self._settled.clear()
                self._wake.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), self._dialer.config.connect_timeout_s + 1.0)
        if self._client is None:
            raise ServerUnavailableError(self.problem or "not connected")
        return self._client

    def _end(self, reason: str) -> None:
        """The connection is of no more use; calls from now on wait for the next one."""
        self.problem = reason
        self._client = None
        self._settled.clear()
        self._ended.set()
        self._changed.set()

    async def _run(self) -> None:
        delay = _FIRST_DELAY_S
        try:
            while True:
                connected = await self._attempt()
                if self._closing or not self._reconnect:
                    return
                delay = _FIRST_DELAY_S if connected else min(delay * 2, _LAST_DELAY_S)
                with contextlib.suppress(TimeoutError):
                    # Jitter, so that a restarted server is not met by all its clients at once.
                    await asyncio.wait_for(self._wake.wait(), delay * random.uniform(0.75, 1.25))  # noqa: S311
                self._wake.clear()
        finally:
            self._client = None
            self._settled.set()

    async def _attempt(self) -> bool:
        """One connection, from its beginning to its end; whether it came about."""
        self._ended.clear()
        self._changed.clear()
        self._dialer.refused.clear()
        self._floods, was_up = "", False
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._dialer.config.connect_timeout_s):
                    client = await stack.enter_async_context(self._dialer.client(self._on_message, self._closed))
                    await self._list(client)
                self._client, self.problem, self._reported, was_up = client, None, None, True
                self._unanswered = 0
                self._settle()
                await self._stay(client)
        except TimeoutError:
            self.problem = self._floods or f"no connection within {self._dialer.config.connect_timeout_s:.0f} s"
        except Exception as error:
            self.problem = self._floods or describe(error) + ("" if was_up else self._hint())
        finally:
            self._client = None
        self._report(was_up)
        if not was_up:  # after a loss, callers wait for the next attempt
            self._settle()
        return was_up and not self._floods

    def _hint(self) -> str:
        if not self._dialer.refused or "HTTP" in str(self.problem):
            return ""
        status = self._dialer.refused[-1]
        return f" (HTTP {status}{': check its credentials' if status in (401, 403) else ''})"

    def _settle(self) -> None:
        self._tried_at = time.monotonic()
        self._settled.set()

    def _report(self, was_up: bool) -> None:
        level = logging.DEBUG if self._closing or self.problem == self._reported else logging.WARNING
        self._reported = self.problem
        what = "lost" if was_up else "cannot connect"
        then = "; trying again" if self._reconnect else ""
        logger.log(level, "mcp %s: %s: %s%s", self.label, what, self.problem, then)

    def _closed(self, reason: str) -> None:
        self._floods = reason
        self._end(reason or "the server closed the connection")

    async def _stay(self, client: Client) -> None:
        listening = asyncio.create_task(self._listen(client))
        try:
            while not self._ended.is_set():
                await self._changed.wait()
                every = min(max(_LISTING_EVERY_S, _LISTING_SHARE * self._listing_s), _LAST_DELAY_S)
                if (early := every - (time.monotonic() - self._listed_at)) > 0:
                    with contextlib.suppress(TimeoutError):  # a server may send this a thousand times a second
                        await asyncio.wait_for(self._ended.wait(), early)
                self._changed.clear()
                if not self._ended.is_set():
                    await self._list(client)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self, client: Client) -> None:
        """Servers of 2026-07-28 report changed tools on a stream that must be requested."""
        tools = client.server_capabilities.tools
        if not tools or not tools.list_changed or client.protocol_version < "2026-07-28":
            return
        try:
            async with client.listen(tools_list_changed=True) as events:
                self._changed.set()  # for a change before the server confirmed the subscription
                async for _ in events:
                    self._changed.set()
        except Exception as error:
            logger.info("mcp %s: tool changes are not announced (%s); listing on age", self.label, describe(error))

    async def _on_message(self, message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._changed.set()

    async def _list(self, client: Client) -> None:
        tools: list[types.Tool] = []
        hidden: set[str] = set()
        cursor: str | None = None
        began = time.monotonic()
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            if any(tool.annotations for tool in page.tools):
                hidden |= await self._hidden(client, cursor)
            cursor = page.next_cursor
            if not cursor or len(tools) >= _MAX_TOOLS:
                break
        else:
            logger.warning("mcp %s: only the first %d pages of tools are read", self.label, _MAX_PAGES)
        self._listed_at = time.monotonic()
        self._listing_s = self._listed_at - began
        info = client.server_info
        self.listing = Listing(
            (info.name if info else "") or self.label,
            client.instructions or "",
            tools,
            frozenset(hidden),
            client.protocol_version,
            time.monotonic(),
        )
        self._on_listing(self.listing)

    async def _hidden(self, client: Client, cursor: str | None) -> set[str]:
        request = types.ListToolsRequest(params=types.PaginatedRequestParams(cursor=cursor) if cursor else None)
        try:
            raw: Any = await client.session.send_request(request, _RawTools)
        except Exception as error:
            logger.info("mcp %s: annotations beyond the standard are not read: %s", self.label, describe(error))
            return set()
        annotated = (tool for tool in raw.tools if isinstance(tool.get("annotations"), dict))
        return {str(tool["name"]) for tool in annotated if tool["annotations"].get("include_in_prompt") is False}


def describe(error: BaseException) -> str:
    """A line about `error`, the innermost of a group. Of URLs only the origin: the rest may be secret."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = _URL.sub(lambda found: origin(found[0]), str(error).split("\n")[0])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def origin(url: str) -> str:
    """`scheme://host:port` of `url`."""
    try:
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    except ValueError:
        return "(a URL)"
