"""Middleware around the whole app, including authentication: formats errors for the requested API.

`/v1/messages` returns errors in Anthropic's format. On every API, the error for a too long prompt has the text and code
by which clients decide to compact their history or use another model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MESSAGES = "/v1/messages"
WITH_X_API_KEY = (MESSAGES, "/v1/models")
"""Path prefixes that Anthropic's clients use, with their key in `x-api-key`."""

TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's error types by HTTP status; others are `invalid_request_error` below 500, else `api_error`."""

_OVERFLOW = re.compile(r"maximum (?:context|model) length")
_COUNTED = re.compile(
    r"maximum context length is (\d+) tokens\. However, your \w+ resulted in (?:more than )?(\d+) tokens"
)
_FIELD = re.compile(r"""'loc': 'body\.?([^']*)', 'msg': (?:'([^']*)'|"([^"]*)")""")
_PARAMETER = re.compile(r" \(parameter=[^)]*\)$")


def count_limit(window: int) -> int:
    """Tokens of a prompt after which counting stops: twice the context window bounds the work of a refused request."""
    return 2 * window


def overflow(window: int, tokens: int | None, what: str) -> str:
    """OpenAI's message for a prompt of `tokens` that a context window of `window` tokens cannot hold.

    `tokens` is None where counting stopped at `count_limit`.
    """
    counted = f"more than {count_limit(window)}" if tokens is None else tokens
    return (
        f"This model's maximum context length is {window} tokens. However, your {what} resulted in {counted} tokens."
        f" Please reduce the length of the {what}."
    )


class ErrorFormat:
    """ASGI middleware. Also turns `x-api-key` into the Bearer token that vLLM's authentication reads."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))

        async def send_head(message: MutableMapping[str, Any]) -> None:
            nonlocal send
            if message["type"] == "http.response.start":
                send = _Error(send, path) if message["status"] >= 400 and _is_json(message) else send
            await send(message)

        await self._app(_with_bearer(scope) if _is_below(path, WITH_X_API_KEY) else scope, receive, send_head)


class _Error:
    """The `send` of an error: collects the body and sends it in the format of `path`."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._head: MutableMapping[str, Any] = {}
        self._parts: list[bytes] = []

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        self._parts.append(message.get("body", b""))
        if not message.get("more_body"):
            text = _formatted(b"".join(self._parts), self._head["status"], self._path)
            others = [pair for pair in self._head["headers"] if pair[0].lower() != b"content-length"]
            await self._send({**self._head, "headers": [*others, (b"content-length", str(len(text)).encode())]})
            await self._send({"type": "http.response.body", "body": text})


def _is_below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(root + "/") for root in roots)


def _is_json(head: MutableMapping[str, Any]) -> bool:
    return any(k.lower() == b"content-type" and v.startswith(b"application/json") for k, v in head.get("headers", ()))


def _with_bearer(scope: Scope) -> Scope:
    headers = {name.lower(): value for name, value in scope["headers"]}
    key = headers.get(b"x-api-key")
    if not key or headers.get(b"authorization", b"").lower().startswith(b"bearer "):
        return scope
    others = [pair for pair in scope["headers"] if pair[0].lower() != b"authorization"]
    return {**scope, "headers": [*others, (b"authorization", b"Bearer " + key)]}


def _formatted(raw: bytes, status: int, path: str) -> bytes:
    """The body of an error of `path`; `raw` if nothing has to change."""
    try:
        body = json.loads(raw)
    except ValueError:
        return raw
    said = body.get("error", body.get("detail")) if isinstance(body, dict) else None
    error: dict[str, Any] = said if isinstance(said, dict) else {"message": str(said)}
    message = str(error.get("message"))
    does_not_fit = status == 400 and _OVERFLOW.search(message) is not None
    if _is_below(path, (MESSAGES,)):
        found = [(at, plain or quoted) for at, plain, quoted in _FIELD.findall(message)]
        message = "; ".join(f"{at}: {why}" if at else why for at, why in found).replace("Value error, ", "") or message
        counted = _COUNTED.search(message)
        if does_not_fit:
            more = f"{counted[2]} tokens > {counted[1]} maximum" if counted else message
            message = f"prompt is too long: {more}"
        kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()
    if not does_not_fit:
        return raw
    named = {"type": "invalid_request_error", "code": "context_length_exceeded"}
    return json.dumps({"error": {**error, "message": _PARAMETER.sub("", message), **named}}).encode()
