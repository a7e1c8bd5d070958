"""The old SSE transport, with all answers on one stream: refused POSTs are reported there too.

The `mcp` package ends its writer at the first HTTP error of a POST, and sends nothing on the stream: the call would
wait for its whole timeout, every later one too, and none would learn of a 401, a 429 or a server that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2

from vllm_gptoss.tools.mcp.answers import HTTP_ERROR, refusal_of


class EventsClient(httpx2.AsyncClient):
    """Answers an HTTP error of a request's POST as a JSON-RPC error on the event stream that was opened last."""

    _stream: _Stream | None = None

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        if request.method != "POST" or not request.headers.get("content-type", "").startswith("application/json"):
            response = await super().send(request, **options)
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                self._stream = _Stream(response.stream)
                response.stream = self._stream
            return response
        try:
            response = await super().send(request, **options)
        except httpx2.HTTPError as error:
            said = {"code": HTTP_ERROR, "message": f"the request could not be sent: {type(error).__name__}"}
            return await self._told(request, said)
        return response if response.status_code < 400 else await self._told(request, refusal_of(response))

    async def _told(self, request: httpx2.Request, error: dict[str, Any]) -> httpx2.Response:
        number = json.loads(request.content).get("id")
        if self._stream is not None and number is not None:
            await self._stream.tell({"jsonrpc": "2.0", "id": number, "error": error})
        return httpx2.Response(202, request=request)


class _Stream(httpx2.AsyncByteStream):
    """A stream of whole events, as from `bounds`, with our events in between."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._parts: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(1)
        self._reading: asyncio.Task[None] | None = None

    async def tell(self, message: dict[str, Any]) -> None:
        await self._parts.put(b"event: message\r\ndata: " + json.dumps(message).encode() + b"\r\n\r\n")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._reading = asyncio.create_task(self._read())
        while (part := await self._parts.get()) is not None:
            if isinstance(part, Exception):
                raise part
            yield part

    async def _read(self) -> None:
        try:
            async for part in self._inner:
                await self._parts.put(part)
        except Exception as error:
            await self._parts.put(error)
        else:
            await self._parts.put(None)

    async def aclose(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
        await self._inner.aclose()
