"""Shared code of the HTTP routes: a request's body and caller, errors as responses, disconnected clients."""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, ParamSpec

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import Response

from vllm_gptoss.server.http import callers
from vllm_gptoss.server.http.bodies import BodyError, bodies_of
from vllm_gptoss.server.responses import ids
from vllm_gptoss.server.responses.errors import ApiError, internal, not_found, store_failed
from vllm_gptoss.server.responses.request.files import read_pdfs
from vllm_gptoss.server.responses.state.caller import Caller
from vllm_gptoss.server.responses.state.stored import StoreError

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
"""OpenAI's clients show it as `_request_id`; log lines of errors have it too."""

_TOO_LARGE = 2**63

P = ParamSpec("P")


def errors(handler: Callable[P, Awaitable[Response]]) -> Callable[P, Coroutine[Any, Any, Response]]:
    """Converts exceptions of a route to OpenAI's error bodies, and adds the request's id to every response."""

    @functools.wraps(handler)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> Response:
        name = f"req_{secrets.token_hex(16)}"
        answer = await answered(name, *args, **kwargs)
        answer.headers.setdefault(REQUEST_ID, name)
        return answer

    async def answered(name: str, *args: P.args, **kwargs: P.kwargs) -> Response:
        try:
            _check_ids(kwargs)
            return await handler(*args, **kwargs)
        except ApiError as error:
            return _answer(error)
        except StoreError as error:
            logger.error("Request %s: %s", name, error)
            return _answer(store_failed(error))
        except ClientDisconnect:
            logger.info("The client of request %s went away; its response is dropped", name)
            return _answer(ApiError("The client closed the request.", status=499))
        except Exception as error:  # a bug; the client still gets an error it can read
            logger.exception("Request %s failed", name)
            return _answer(internal(error))

    return wrapped


def _check_ids(path: Mapping[str, Any]) -> None:
    """Refuses strings that cannot be ids before a query: PostgreSQL rejects some of them."""
    for name, value in path.items():
        if name.endswith("_id") and isinstance(value, str) and not ids.is_one(value):
            raise not_found(name.removesuffix("_id").capitalize(), value[:128])


def _answer(error: ApiError) -> Response:
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else None
    return JSONResponse(error.body(), error.status, headers)


async def body_of(request: Request) -> Any:
    """The JSON body, its PDFs read. Raises `ApiError` for invalid JSON or PDFs, or a body that is too large."""
    bodies = bodies_of(request)
    try:
        raw = await bodies.read(request)
        body = await bodies.parse(raw) if raw else {}
    except BodyError as error:
        raise unread(error) from None
    await read_pdfs(body, callers.caller_of(request))
    return body


def unread(error: BodyError) -> ApiError:
    """The client's error for a body that cannot be read."""
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return ApiError(error.detail, code=error.code, status=error.status_code, kind=kind)


def caller_of(connection: HTTPConnection) -> Caller:
    """The caller of a request, from its headers."""
    headers = connection.headers
    trace = {name: value for name in ("traceparent", "tracestate") if (value := headers.get(name))}
    codex = headers.get("originator", "").startswith("codex")
    return Caller(
        callers.tenant_of(headers.get("authorization")),
        callers.caller_of(connection),
        codex,
        trace or None,
        _number(headers, "X-Vllm-Priority"),
        headers.get("X-Session-ID") or None,
        _number(headers, "X-data-parallel-rank"),
    )


def _number(headers: Mapping[str, str], name: str) -> int | None:
    value = headers.get(name)
    try:
        number = int(value) if value else None
    except ValueError:
        number = _TOO_LARGE
    if number is not None and not -_TOO_LARGE <= number < _TOO_LARGE:  # which no message to the engine can hold
        logger.warning("The header %s is ignored: %.40r is no whole number of 64 bits", name, value)
        return None
    return number
