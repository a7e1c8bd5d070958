"""The WebSocket under /v1/responses: `response.create` in, the events of a stream out, one response at a time.

Unstored responses live as long as their connection, so that `previous_response_id` works with `store: false`. A failed
continuation forgets the response it went on from: the client must begin anew. Open Responses specification, WebSocket.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json
from starlette.websockets import WebSocket, WebSocketDisconnect

from vllm_gptoss.responses import extras
from vllm_gptoss.responses.body import parse_json
from vllm_gptoss.responses.errors import ApiError, internal, store_failed
from vllm_gptoss.responses.events import Event
from vllm_gptoss.responses.http import caller_of, named, names_of
from vllm_gptoss.responses.request import CreateRequest, parse_create
from vllm_gptoss.responses.service import Service
from vllm_gptoss.responses.store import StoreError

logger = logging.getLogger(__name__)

MAX_WAITING = 16
"""Requests that a client may send before the first is answered."""


async def serve_websocket(service: Service, socket: WebSocket) -> None:
    await socket.accept()
    connection = _Connection(service, socket)
    worker = asyncio.create_task(connection.work())
    try:
        while not worker.done():
            await connection.waiting.put(await socket.receive_text())
    except (WebSocketDisconnect, KeyError):  # KeyError: a binary message
        pass
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


class _Connection:
    """One client. `waiting` holds its messages in order."""

    def __init__(self, service: Service, socket: WebSocket) -> None:
        self._service = service
        self._socket = socket
        self._names = names_of(socket)
        self._caller = caller_of(socket)
        self.waiting: asyncio.Queue[str] = asyncio.Queue(MAX_WAITING)

    async def work(self) -> None:
        try:
            while True:
                await self._answer(await self.waiting.get())
        except (WebSocketDisconnect, RuntimeError) as error:
            logger.debug("A WebSocket ended while it was written to: %s", error)

    async def _answer(self, text: str) -> None:
        stream_id = None
        try:
            message = parse_json(text)
            if not isinstance(message, dict) or message.get("type") != "response.create":
                kind = message.get("type") if isinstance(message, dict) else None
                raise ApiError(f"Messages of type '{kind}' are not understood.", param="type", code="unsupported_value")
            # Some clients nest the request, as the Realtime API does.
            nested = message.pop("response", None)
            message |= nested if isinstance(nested, dict) else {}
            stream_id = message.get("stream_id")
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
            # A WebSocket always streams; `stream` and its options may be there, and mean nothing.
            request = parse_create({**message, "stream": True})
            if request.generate is False:
                await self._warm(request, stream_id)
                return
            loop = await self._service.prepare(request, self._caller)
            async with aclosing(loop.run()) as batches:
                async for batch in batches:
                    for event in batch:
                        await self._send(event, stream_id)
                        if event["type"] == "response.failed":
                            self._forget(previous)
        except ApiError:
            self._forget(previous)
            raise

    async def _warm(self, request: CreateRequest, stream_id: str | None) -> None:
        """`generate: false`: keeps the input under an id and generates nothing."""
        for event in await extras.warm(self._service, request, self._caller):
            await self._send(event, stream_id)

    def _forget(self, previous: Any) -> None:
        if isinstance(previous, str):
            self._caller.memory.pop(previous, None)

    async def _send(self, event: Event, stream_id: str | None) -> None:
        if stream_id is not None:
            event = {**event, "stream_id": stream_id}
        await self._socket.send_text(to_json(named(event, self._names)).decode())

    async def _send_error(self, error: ApiError, stream_id: str | None) -> None:
        event = {"type": "error", "status": error.status, "error": error.body()["error"]}
        await self._send(event, stream_id)
