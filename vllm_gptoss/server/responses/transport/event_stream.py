"""Server-sent events: event names by API, frames, and the detection of clients that disconnect or read nothing."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import cache

import msgspec
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm_gptoss.server.responses.errors import ApiError, store_failed
from vllm_gptoss.server.responses.run.events import Batches, Event, TextDeltas
from vllm_gptoss.server.responses.run.loop import Loop
from vllm_gptoss.server.responses.state.stored import StoreError
from vllm_gptoss.server.streaming.direct_send import Outlet

logger = logging.getLogger(__name__)

KEEP_ALIVE = 15.0
"""Seconds of silence, while a tool runs, after which a comment is sent so that proxies keep the connection."""

SEND_TIMEOUT = 300.0
"""Seconds that a reader may take nothing at all before the stream is given up, to within `KEEP_ALIVE`."""

OPEN_RESPONSES = "/v1/openresponses"
"""Under this prefix events have the names of the Open Responses specification, where those differ from OpenAI's."""

OPENAI_NAMES: Mapping[str, str] = {}
OPEN_NAMES: Mapping[str, str] = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}


def names_of(connection: HTTPConnection) -> Mapping[str, str]:
    """The event names a client wants: Open Responses' by path or by its version header, else OpenAI's."""
    asked = connection.url.path.startswith(OPEN_RESPONSES) or "openresponses-version" in connection.headers
    return OPEN_NAMES if asked else OPENAI_NAMES


def named(event: Event, names: Mapping[str, str]) -> Event:
    """`event` under the name that the client wants."""
    return {**event, "type": names[event["type"]]} if event["type"] in names else event


def obfuscated(event: Event) -> Event:
    """A delta padded with random characters, so that the size of a packet does not reveal the length of its text."""
    if "delta" not in event:
        return event
    return {**event, "obfuscation": secrets.token_hex(16)[: 1 + secrets.randbelow(16)]}


_encode = msgspec.json.Encoder().encode  # a third of the time of pydantic's


@cache
def _head(name: str) -> bytes:
    return b"event: " + name.encode() + b"\ndata: "


def frame(event: Event) -> bytes:
    """One event in the text/event-stream format (WHATWG HTML, section 9.2)."""
    return b"%b%b\n\n" % (_head(event["type"]), _encode(event))


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Server-sent events. A disconnect cancels the generator at once, also while it waits for a tool.

    after: number of the last event that the client has. loop: the source of the events, if it runs here.
    """

    outlet: Outlet

    media_type = "text/event-stream"

    def __init__(
        self,
        batches: Batches,
        names: Mapping[str, str] = OPENAI_NAMES,
        *,
        obfuscate: bool = False,
        after: int = -1,
        loop: Loop | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._names = names
        self._obfuscate = obfuscate
        del self.headers["content-length"]
        self._batches = batches
        self._loop = loop
        self._deltas: TextDeltas | None = None
        self._around = (b"", b"", b"")
        self._is_sending = False
        self._last_send = time.monotonic()
        self._next = after + 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self.outlet = Outlet(send)
        if self._loop is not None:
            self._loop.live = self
        pump = asyncio.create_task(self._pump(send))
        watch = asyncio.create_task(self._watch(receive, send))
        try:
            await asyncio.wait((pump, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (pump, watch):
                task.cancel()
            results = await asyncio.gather(pump, watch, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, OSError):
                logger.warning("A stream ended early: %s: %s", type(result).__name__, result)

    async def _pump(self, send: Send) -> None:
        try:
            async with aclosing(self._batches) as batches:
                async for batch in batches:
                    if batch:
                        await self._send(send, self.framed(batch))
        except (ApiError, StoreError) as error:  # not a failure of the response: it has no event for this
            logger.warning("A stream ended early: %s", error)
            failure = store_failed(error) if isinstance(error, StoreError) else error
            fields = {"code": failure.code, "message": failure.message, "param": failure.param}
            await self._send(send, frame({"type": "error", "sequence_number": self._next, **fields}))
        await self._send(send, DONE, more=False)

    def framed(self, events: Sequence[Event]) -> bytes:
        """The bytes of the next events."""
        self._next = events[-1]["sequence_number"] + 1
        if self._names:
            events = [named(event, self._names) for event in events]
        if self._obfuscate:
            events = [obfuscated(event) for event in events]
        return b"".join(map(frame, events))

    def framed_text(self, deltas: TextDeltas, number: int, text: str) -> bytes:
        """The bytes of the next event, one of `deltas`, which encode their common fields once."""
        if self._obfuscate:
            return self.framed([deltas.event(number, text)])
        if deltas is not self._deltas:
            before, _, rest = frame(named(deltas.event(0, ""), self._names)).partition(b'"sequence_number":0')
            between, _, after = rest.rpartition(b'"delta":""')
            self._deltas, self._around = deltas, (before + b'"sequence_number":', between + b'"delta":', after)
        before, between, after = self._around
        return b"%b%d%b%b%b" % (before, number, between, _encode(text), after)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        # `_watch` detects from these that the client reads nothing: a timer per send would cost each token 4 µs.
        self._is_sending, self._last_send = True, time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._is_sending = False

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Returns when the client has disconnected; sends comments on a silent stream.

        Raises:
            TimeoutError: the reader takes nothing.
        """
        while True:
            try:
                async with asyncio.timeout(min(KEEP_ALIVE, SEND_TIMEOUT)):
                    message = await receive()
            except TimeoutError:
                await self._look(send)
                continue
            if message["type"] == "http.disconnect":
                return

    async def _look(self, send: Send) -> None:
        silence = time.monotonic() - max(self._last_send, self.outlet.last_push)
        is_sending = self._is_sending or self.outlet.is_stalled
        if is_sending and silence >= SEND_TIMEOUT:
            raise TimeoutError(f"the reader took nothing for {SEND_TIMEOUT:g} s")
        if not is_sending and silence >= KEEP_ALIVE:
            async with asyncio.timeout(SEND_TIMEOUT):
                await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})
