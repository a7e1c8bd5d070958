"""HTTP around the service: bodies in, errors and server-sent events out, and noticing that nobody listens any more."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, ParamSpec, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm_gptoss.responses.body import parse_json
from vllm_gptoss.responses.errors import ApiError, internal, store_failed
from vllm_gptoss.responses.events import Event
from vllm_gptoss.responses.past import Caller
from vllm_gptoss.responses.service import Batches
from vllm_gptoss.responses.store import StoreError

logger = logging.getLogger(__name__)

KEEP_ALIVE = 15.0
"""Seconds of silence, while a tool runs, after which a comment is sent so that proxies keep the connection."""

SEND_TIMEOUT = 300.0
"""Seconds that a reader may take nothing at all before the stream is given up."""

P = ParamSpec("P")
R = TypeVar("R")


def errors(handler: Callable[P, Awaitable[Response]]) -> Callable[P, Coroutine[Any, Any, Response]]:
    """Turns what a route raises into OpenAI's error bodies."""

    @functools.wraps(handler)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> Response:
        try:
            return await handler(*args, **kwargs)
        except ApiError as error:
            return _answer(error)
        except StoreError as error:
            logger.error("%s", error)
            return _answer(store_failed(error))
        except Exception as error:  # a bug; the client still gets an error it can read
            logger.exception("A request failed")
            return _answer(internal(error))

    return wrapped


def _answer(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status)


async def body_of(request: Request) -> Any:
    """The JSON body. Raises `ApiError` for what is no JSON."""
    raw = await request.body()
    return parse_json(raw) if raw else {}


def tenant_of(authorization: str | None) -> str:
    """Who owns what this request stores: a hash of the API key, or `public` without one."""
    key = (authorization or "").removeprefix("Bearer ").strip()
    return hashlib.sha256(key.encode()).hexdigest()[:32] if key else "public"


TRACE_HEADERS = ("traceparent", "tracestate")


def caller_of(connection: HTTPConnection) -> Caller:
    headers = connection.headers
    trace = {name: value for name in TRACE_HEADERS if (value := headers.get(name))}
    codex = headers.get("originator", "").startswith("codex")
    return Caller(tenant_of(headers.get("authorization")), codex, trace or None)


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
    return {**event, "type": names[event["type"]]} if event["type"] in names else event


def obfuscated(event: Event) -> Event:
    """A delta padded with random characters, so that the size of a packet does not tell the length of its text."""
    if "delta" not in event:
        return event
    return {**event, "obfuscation": secrets.token_hex(16)[: 1 + secrets.randbelow(16)]}


def error_event(error: ApiError, number: int) -> Event:
    """The `error` event of a stream that cannot go on."""
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return {"type": "error", "sequence_number": number, **fields}


def frame(event: Event) -> bytes:
    """One event in the text/event-stream format (WHATWG HTML, section 9.2)."""
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + to_json(event) + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Server-sent events. A disconnect cancels the generator at once, also while it waits for a tool."""

    media_type = "text/event-stream"

    def __init__(self, batches: Batches, names: Mapping[str, str] = OPENAI_NAMES, *, obfuscate: bool = False) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._names = names
        self._obfuscate = obfuscate
        del self.headers["content-length"]
        self._batches = batches
        self._idle = True
        self._next = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
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
                        await self._send(send, self._framed(batch))
        except (ApiError, StoreError) as error:  # nothing that a response can say of itself
            logger.warning("A stream ended early: %s", error)
            failure = store_failed(error) if isinstance(error, StoreError) else error
            await self._send(send, frame(error_event(failure, self._next)))
        await self._send(send, DONE, more=False)

    def _framed(self, batch: list[Event]) -> bytes:
        self._next = batch[-1]["sequence_number"] + 1
        if self._names:
            batch = [named(event, self._names) for event in batch]
        if self._obfuscate:
            batch = [obfuscated(event) for event in batch]
        return b"".join(map(frame, batch))

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        self._idle = False
        try:
            async with asyncio.timeout(SEND_TIMEOUT):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise TimeoutError(f"the reader took nothing for {SEND_TIMEOUT:g} s") from None

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Returns when the client has gone; meanwhile keeps a silent stream alive."""
        while True:
            self._idle = True
            try:
                async with asyncio.timeout(KEEP_ALIVE):
                    message = await receive()
            except TimeoutError:
                if self._idle:
                    await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})
                continue
            if message["type"] == "http.disconnect":
                return


async def unless_gone(request: Request, work: Coroutine[Any, Any, R]) -> R:
    """Runs `work`, and cancels it when the client disconnects. Raises `ApiError` (499) then, which nobody reads."""
    task = asyncio.create_task(work)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.create_task(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        logger.info("The client went away; its response is dropped")
        raise ApiError("The client closed the request.", status=499)
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
