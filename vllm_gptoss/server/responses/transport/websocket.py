"""The WebSocket under /v1/responses: `response.create` in, the events of a stream out.

Requests of one `stream_id` are answered in order, one at a time; different `stream_id`s run concurrently. Unstored
responses live as long as their connection, so that `previous_response_id` works with `store: false`. A failed
continuation removes the response it continues: the client must send the whole conversation. Source: Open Responses
specification, WebSocket.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pydantic_core import to_json
from starlette.websockets import WebSocket, WebSocketDisconnect

from vllm_gptoss.server.http.bodies import Bodies, BodyError, bodies_of
from vllm_gptoss.server.http.callers import FullError
from vllm_gptoss.server.responses.errors import ApiError, full, internal, store_failed
from vllm_gptoss.server.responses.request.files import read_pdfs
from vllm_gptoss.server.responses.run.events import Event
from vllm_gptoss.server.responses.run.service import Service
from vllm_gptoss.server.responses.state.caller import UnstoredResponses
from vllm_gptoss.server.responses.state.stored import StoreError
from vllm_gptoss.server.responses.transport.event_stream import named, names_of
from vllm_gptoss.server.responses.transport.http import caller_of, unread

logger = logging.getLogger(__name__)

MAX_WAITING = 16
"""Requests that a client may send before the first is answered."""

MAX_STREAMS = 8
"""Responses at once on one connection; further streams wait."""

SEND_S = 60.0
"""Seconds for sending one event to a client that reads slowly; then the connection ends."""

MAX_STREAM_ID = 128
"""Characters; it is in every event, one a token."""


async def serve_websocket(service: Service, socket: WebSocket) -> None:
    """Answers one client until it disconnects or a send fails."""
    await socket.accept()
    connection = _Connection(service, socket)
    try:
        leave = service.sockets.take(connection.caller.owner)
    except FullError as error:
        await connection.refuse(full(error, "WebSockets are open"))
        return
    tasks = [asyncio.create_task(connection.read()), asyncio.create_task(connection.work())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leave()
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                logger.warning("A WebSocket ended early: %s: %s", type(result).__name__, result)


_Message = dict[str, Any] | ApiError


class _Connection:
    """One client. `waiting` holds its messages in order."""

    def __init__(self, service: Service, socket: WebSocket) -> None:
        self._service = service
        self._socket = socket
        self._names = names_of(socket)
        self._bodies = bodies_of(socket)
        self.caller = replace(caller_of(socket), memory=UnstoredResponses())
        self._writing = asyncio.Lock()
        self._at_once = asyncio.Semaphore(MAX_STREAMS)
        self._room = asyncio.Semaphore(MAX_WAITING)
        self._last: dict[str | None, asyncio.Task[None]] = {}
        self.waiting: asyncio.Queue[str | bytes] = asyncio.Queue(1)

    async def read(self) -> None:
        """Returns when the client has disconnected. Binary messages are read as text."""
        while (message := await self._socket.receive())["type"] != "websocket.disconnect":
            await self.waiting.put(message.get("text") or message.get("bytes") or "")

    async def refuse(self, error: ApiError) -> None:
        """Sends `error` and closes the connection."""
        await self._send_error(error, None)
        await self._socket.close(1013)  # "try again later", RFC 6455's registry of close codes

    async def work(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    text = await self.waiting.get()
                    await self._room.acquire()
                    message = await _read(text, self._bodies)
                    stream_id = None if isinstance(message, ApiError) else message.get("stream_id")
                    before = self._last.get(stream_id)
                    self._last[stream_id] = group.create_task(self._in_turn(message, stream_id, before))
        except* (WebSocketDisconnect, RuntimeError) as errors:
            logger.debug("A WebSocket ended while it was written to: %s", errors.exceptions[0])

    async def _in_turn(self, message: _Message, stream_id: str | None, before: asyncio.Task[None] | None) -> None:
        """Answers after the stream's request `before` is answered."""
        try:
            if before:
                await asyncio.wait([before])
            async with self._at_once:
                await self._answer(message, stream_id)
        finally:
            self._room.release()
            if self._last.get(stream_id) is asyncio.current_task():
                del self._last[stream_id]

    async def _answer(self, message: _Message, stream_id: str | None) -> None:
        try:
            if isinstance(message, ApiError):
                raise message
            await self._create(message)
        except ApiError as error:
            await self._send_error(error, stream_id)
        except StoreError as error:
            await self._send_error(store_failed(error), stream_id)
        except (WebSocketDisconnect, RuntimeError):
            raise
        except Exception as error:
            logger.exception("A request on a WebSocket failed")
            await self._send_error(internal(error), stream_id)

    async def _create(self, message: dict[str, Any]) -> None:
        if message.get("background"):
            raise ApiError("'background' is for HTTP.", param="background", code="unsupported_value")
        stream_id = message.get("stream_id")
        previous = message.get("previous_response_id")
        try:
            await read_pdfs(message, self.caller.owner)
            # A WebSocket always streams; `stream` and its options are ignored.
            request = await self._service.read({**message, "stream": True}, self.caller)
            if request.generate is False:
                for event in await self._service.warm(request, self.caller):
                    await self._send(event, stream_id)
                return
            loop = await self._service.prepare(request, self.caller)
            async with aclosing(loop.run()) as batches:
                async for batch in batches:
                    for event in batch:
                        await self._send(event, stream_id)
                        if event["type"] == "response.failed":
                            self._forget(previous)
        except ApiError:
            self._forget(previous)
            raise

    def _forget(self, previous: Any) -> None:
        if isinstance(previous, str) and self.caller.memory is not None:
            self.caller.memory.forget(previous)

    async def _send(self, event: Event, stream_id: str | None) -> None:
        if stream_id is not None:
            event = {**event, "stream_id": stream_id}
        text = to_json(named(event, self._names)).decode()
        try:
            async with self._writing, asyncio.timeout(SEND_S):
                await self._socket.send_text(text)
        except TimeoutError:
            raise RuntimeError(f"the client read nothing for {SEND_S:g} s") from None

    async def _send_error(self, error: ApiError, stream_id: str | None) -> None:
        await self._send({"type": "error", "status": error.status, **error.body()}, stream_id)


async def _read(text: str | bytes, bodies: Bodies) -> _Message:
    """A `response.create`, or its error, which is sent in the order of the requests."""
    raw = text.encode() if isinstance(text, str) else text
    try:
        await bodies.check(raw)
        message = await bodies.parse(raw)
        if not isinstance(message, dict) or message.get("type") != "response.create":
            kind = message.get("type") if isinstance(message, dict) else None
            raise ApiError(f"Messages of type '{kind}' are not understood.", param="type", code="unsupported_value")
        # Some clients nest the request, as the Realtime API does.
        nested = message.pop("response", None)
        message |= nested if isinstance(nested, dict) else {}
        if not isinstance(message.get("stream_id"), str | None):
            raise ApiError("'stream_id' must be a string.", param="stream_id", code="invalid_type")
        if len(message.get("stream_id") or "") > MAX_STREAM_ID:
            reason = f"'stream_id' has at most {MAX_STREAM_ID} characters."
            raise ApiError(reason, param="stream_id", code="invalid_value")
    except BodyError as error:
        return unread(error)
    except ApiError as error:
        return error
    return message
