"""Checks a server's answers before the `mcp` package reads them: clear errors, and no parts that break other calls."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from http.client import responses
from typing import Any

import httpx2
import mcp_types as types
from pydantic import ValidationError

logger = logging.getLogger(__name__)

HTTP_ERROR = -32050
"""The JSON-RPC code of the errors made here; `data.http_status` has the number."""

MAX_TOOLS = 500
"""Tools in one page of a listing. The event loop validates each tool twice, which takes 0.1 ms."""

_ADVICE = {
    401: "its credentials are missing or wrong",
    403: "its credentials do not allow this",
    429: "too many requests",
}


async def explained(response: httpx2.Response) -> None:
    """Gives an HTTP error of a call its own words: to the `mcp` package, every status but 404 is one and the same.

    A JSON-RPC error in the body stays, except with 401, 403 and 429, which have advice.
    """
    status = response.status_code
    sent = response.request.headers.get("content-type", "")
    said = response.headers.get("content-type", "").lower()
    if status < 400 or status == 404 or response.request.method != "POST" or not sent.startswith("application/json"):
        return
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": refusal_of(response)}).encode()
    is_read = said.startswith("application/json") and status not in _ADVICE
    response.headers["content-type"] = "application/json"
    response.headers.pop("content-length", None)
    response.stream = _Instead(body, response.stream, is_read)


def refusal_of(response: httpx2.Response) -> dict[str, Any]:
    status = response.status_code
    phrase = "the server failed" if status >= 500 else responses.get(status, "the server refused it")
    message = f"HTTP {status}: {_ADVICE.get(status, phrase)}"
    if (wait := response.headers.get("retry-after", "")).isascii() and wait.isdigit() and len(wait) < 6:
        message += f"; try again in {wait} s"
    return {"code": HTTP_ERROR, "message": message, "data": {"http_status": status}}


def without_broken_tools(message: Any) -> Any:
    """`message` without the tools that break the protocol, where it lists any: one of them would cost all others.

    Without their output schemas, too: the `mcp` package follows those on the event loop without a check.
    """
    answer: Any = getattr(message, "message", None)
    result = getattr(answer, "result", None)
    if not isinstance(result, dict) or not isinstance(result.get("tools"), list):
        return message
    listed = result["tools"][:MAX_TOOLS]
    if len(listed) < len(result["tools"]):
        logger.warning("mcp: only the first %d of %d tools of a page are read", MAX_TOOLS, len(result["tools"]))
    kept = [{k: v for k, v in tool.items() if k != "outputSchema"} for tool in listed if _is_tool(tool)]
    if kept == result["tools"]:
        return message
    return replace(message, message=answer.model_copy(update={"result": {**result, "tools": kept}}))


def _is_tool(tool: Any) -> bool:
    try:
        types.Tool.model_validate(tool, by_name=False)
    except ValidationError as error:
        name = tool.get("name") if isinstance(tool, dict) else None
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        logger.warning("mcp: the tool %.100r is left out: %s: %s", name, where[:100], error.errors()[0]["msg"])
        return False
    return True


class _Instead(httpx2.AsyncByteStream):
    """`body` in the place of another stream. is_read: unless that is a JSON-RPC error; else it is closed unread."""

    def __init__(self, body: bytes, other: Any, is_read: bool) -> None:
        self._body = body
        self._other = other
        self._is_read = is_read

    async def __aiter__(self) -> AsyncIterator[bytes]:
        theirs = b"".join([part async for part in self._other]) if self._is_read else b""
        yield theirs if _is_error(theirs) else self._body

    async def aclose(self) -> None:
        await self._other.aclose()


def _is_error(body: bytes) -> bool:
    """Whether it is a JSON-RPC error. `bounds` has limited its size and nodes."""
    try:
        types.JSONRPCError.model_validate_json(body, by_name=False)
    except ValidationError:
        return False
    return True
