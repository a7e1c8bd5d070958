"""Reads the request bodies of all routes: counts while receiving, decodes in bounded time, reports the first error.

Bytes, values and depth are counted before anything is decoded: a million lists are 3 MB, and would become 74 s and
14.5 GiB of validation errors. Large bodies are decoded in a confined worker.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.params import Form
from fastapi.routing import APIRoute, request_response
from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import Response

from vllm_gptoss.server.http.callers import caller_of
from vllm_gptoss.tools.confined import BusyError, ConfinedError, Limit, Refused, pool
from vllm_gptoss.tools.confined.json_tree import STEP, Count
from vllm_gptoss.tools.confined.json_value import decode, decoded
from vllm_gptoss.tools.protocol import CALLER
from vllm_gptoss.tools.slots import Slots

T = TypeVar("T")

MAX_DEPTH = 128
"""Objects and lists inside each other. Schemas are read recursively; OpenAI allows ten levels of them."""

SERIES = 16
"""Numbers of a list that count as one value. A prompt may be 131,072 token ids. The most that the default limit allows,
800,000, are decoded in 40 ms and validated in 50 (2 cores, Python 3.11)."""

READ_S = 300.0
"""Seconds within which a body must arrive."""

EACH_TURN = 4
"""Requests that continue in one iteration of the event loop after their body: 400 at once stopped it for 0.8 s."""

APART = 8 << 20
"""Bytes that the event loop decodes in at most 40 ms (worst case, 2 cores, Python 3.11)."""

_LIMIT = Limit(memory=1 << 30, payload=1 << 30, answer=1 << 30)
"""Limit of the worker that decodes a body; the body's own limits are checked first."""


class BodyError(HTTPException):
    """A rejected body. `code` as in OpenAI's errors."""

    def __init__(self, message: str, status: int = 413, code: str = "request_too_large") -> None:
        super().__init__(status, message)
        self.code = code


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bytes and JSON values of one body; bytes of all bodies being received, per caller and in total."""

    max_bytes: int = 32 << 20
    max_values: int = 50_000
    caller_bytes: int = 64 << 20
    total_bytes: int = 256 << 20


class Bodies:
    """Reads the bodies of one app."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._held: Counter[str] = Counter()
        self._turns = Slots(EACH_TURN)

    async def read(self, request: Request) -> bytes:
        """The body, within the limits for bytes, values and depth. Raises `BodyError`."""
        declared = request.headers.get("content-length", "0")
        self._check_size(int(declared) if declared.isdecimal() and len(declared) < 20 else 0)
        caller, size, parts = caller_of(request), 0, []
        count = self._count()
        try:
            async with asyncio.timeout(READ_S):
                async for part in request.stream():
                    size += len(part)
                    self._held[caller] += len(part)
                    self._check_size(size)
                    self._check_share(caller)
                    _add(count, part)
                    parts.append(part)
        except TimeoutError:
            message = f"The request body did not come within {READ_S:.0f} s."
            raise BodyError(message, 408, "request_timeout") from None
        finally:
            self._held[caller] -= size
            if not self._held[caller]:
                del self._held[caller]
        async with self._turns.one(caller):
            await asyncio.sleep(0)
        return b"".join(parts)

    async def check(self, message: bytes) -> None:
        """Checks a whole message against the same limits. Raises `BodyError`."""
        self._check_size(len(message))
        count = self._count()
        for at in range(0, len(message), STEP):
            _add(count, message[at : at + STEP])
            await asyncio.sleep(0)

    async def parse(self, raw: bytes) -> Any:
        """Decodes a body from `read` or `check`. Raises `BodyError`."""
        try:
            return await pool().run(decoded, raw, _LIMIT) if len(raw) > APART else decode(raw)
        except (ValueError, RecursionError, Refused, ConfinedError) as error:
            raise BodyError(f"The request body is not JSON: {error}.", 400, "invalid_json") from None
        except BusyError as error:
            raise BodyError(f"Large request bodies wait to be decoded: {error}.", 503, "server_busy") from None

    def _count(self) -> Count:
        return Count(self._limits.max_values, MAX_DEPTH, SERIES)

    def _check_size(self, size: int) -> None:
        if size > self._limits.max_bytes:
            raise _too_large(f"it has more than {self._limits.max_bytes} bytes")

    def _check_share(self, caller: str) -> None:
        """At the total limit, callers above an equal share are refused."""
        total, mine = self._held.total(), self._held[caller]
        if mine > self._limits.caller_bytes or (total > self._limits.total_bytes and mine * len(self._held) >= total):
            message = "Too many bytes of request bodies are being read at once; send fewer requests at a time."
            raise BodyError(message, 429, "rate_limit_exceeded")


def _too_large(problem: str) -> BodyError:
    settings = "GPTOSS_MAX_BODY_BYTES and GPTOSS_MAX_BODY_VALUES are the server's limits"
    return BodyError(f"The request body is too large: {problem} ({settings}).")


def _add(count: Count, part: bytes) -> None:
    for at in range(0, len(part), STEP):
        if problem := count.add(part[at : at + STEP]):
            raise _too_large(problem)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Awaits `work`, and cancels it when the client disconnects. The body must have been read.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        scope.reschedule(0)

    try:
        async with asyncio.timeout(None) as scope:
            watching = asyncio.create_task(watch())
            try:
                return await work
            finally:
                watching.cancel()
    except TimeoutError:
        if is_gone:
            raise ClientDisconnect from None
        raise


def bodies_of(connection: HTTPConnection) -> Bodies:
    """The `Bodies` of the connection's app."""
    state = connection.app.state
    if not hasattr(state, "gptoss_bodies"):
        state.gptoss_bodies = Bodies(BodyLimits())
    found: Bodies = state.gptoss_bodies
    return found


def bound(app: FastAPI, limits: BodyLimits) -> None:
    """Applies `limits` to all routes of `app`, including vLLM's."""
    app.state.gptoss_bodies = Bodies(limits)
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods & {"POST", "PUT", "PATCH"}:
            route.app = request_response(_handler(route))


class _Read(Request):
    """A request with a body read by `Bodies`. `value`: the validated body, for the first `json()` (FastAPI's)."""

    raw: bytes | None = None
    value: Any = None

    async def body(self) -> bytes:
        if self.raw is None:
            self.raw = await bodies_of(self).read(self)
        return self.raw

    async def json(self) -> Any:
        value, self.value = self.value, None
        return await bodies_of(self).parse(await self.body()) if value is None else value


def _handler(route: APIRoute) -> Callable[[Request], Awaitable[Response]]:
    inner, field = route.get_route_handler(), route.body_field
    is_json = field is not None and not isinstance(field.field_info, Form)
    kind: Any = field.field_info.annotation if field is not None and is_json else None
    validator = fail_fast(kind) if kind is not None else None

    async def handle(request: Request) -> Response:
        CALLER.set(caller_of(request))
        read = _Read(request.scope, request.receive)
        if validator is not None and "json" in request.headers.get("content-type", "") and await read.body():
            try:
                # FastAPI's own validation returns an instance as it is.
                read.value = validator.validate_python(await read.json(), from_attributes=True)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                raise RequestValidationError([{**first, "loc": ("body", *first["loc"])}]) from None
        try:
            return await inner(read)
        except ClientDisconnect:
            return Response(status_code=499)  # not sent: the client is gone

    return handle


@functools.cache
def fail_fast(kind: Any) -> SchemaValidator:
    """Pydantic's validator of a type, which stops at the first invalid element of a list or mapping."""
    adapter = TypeAdapter(kind)
    adapter.rebuild()
    return SchemaValidator(_fail_fast(adapter.core_schema))


def _fail_fast(schema: Any) -> Any:
    if isinstance(schema, dict):
        found = {key: _fail_fast(value) for key, value in schema.items()}
        is_container = schema.get("type") in ("list", "tuple", "set", "frozenset", "dict")
        return found | {"fail_fast": True} if is_container else found
    return type(schema)(map(_fail_fast, schema)) if type(schema) in (list, tuple) else schema
