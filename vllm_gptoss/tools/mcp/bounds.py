"""Bounds on an MCP server's answers over HTTP, checked before the `mcp` package parses them on the event loop.

Bytes are counted after decompression; the nodes of a JSON tree are counted before the tree is built.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx2

from vllm_gptoss.tools.confined import BusyError, ConfinedError, Refused, pool
from vllm_gptoss.tools.confined.content import SMALL, Undoing, json_content
from vllm_gptoss.tools.confined.json_tree import MAX_NODES, may_exceed

MAX_ANSWER_BYTES = 16 << 20
"""One answer over streamable HTTP: an image of 10 MB fits in base64; what is larger breaks the connection."""

_PARTS = 16
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_HURRY, _A_SECOND = re.compile(rb"(^|[\r\n])retry:[ ]?0*\d{0,3}(?=[\r\n])"), rb"\1retry: 1000"
"""`retry: 0` requests that an event stream is opened again more than once a second."""


async def bound(response: httpx2.Response) -> None:
    encoding = response.headers.pop("content-encoding", "")
    events = response.headers.get("content-type", "").startswith("text/event-stream")
    response.stream = _Events(response.stream, encoding) if events else _Body(response.stream, encoding)


class _Content(httpx2.AsyncByteStream):
    """A body without its content encoding, in pieces of at most 64 KiB."""

    def __init__(self, inner: Any, encoding: str) -> None:
        self._inner = inner
        self._encoding = encoding

    async def content(self) -> AsyncIterator[bytes]:
        try:
            undoing = Undoing(self._encoding)
            async for chunk in self._inner:
                for number, part in enumerate(undoing.feed(chunk), 1):
                    yield part
                    if number % _PARTS == 0:  # 64 kB may be a thousand times as much
                        await asyncio.sleep(0)
        except Refused as error:
            raise httpx2.ReadError(str(error)) from None

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Body(_Content):
    """A body that ends with an error where it is too large to be a tool's answer."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        body = bytearray()
        async for part in self.content():
            body += part
            if len(body) > MAX_ANSWER_BYTES:
                raise httpx2.ReadError(f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
        await _check(bytes(body))
        yield bytes(body)


class _Events(_Content):
    """An event stream, event by event, with `retry` fields of at least 1,000 ms. Their size is the `mcp` package's to
    bound, and bounded here by the same."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        event = bytearray()
        async for part in self.content():
            seen = max(0, len(event) - 3)
            event += part
            ends = [found.end() for found in _EVENT_END.finditer(event, seen)]
            if ends:
                whole, event = bytes(event[: ends[-1]]), event[ends[-1] :]
                await _check(whole)
                for start, end in itertools.pairwise([0, *ends]):  # so that others run between two of them
                    yield _HURRY.sub(_A_SECOND, whole[start:end])
                    await asyncio.sleep(0)
            if len(event) > MAX_ANSWER_BYTES + SMALL:
                raise httpx2.ReadError(f"the event is larger than {MAX_ANSWER_BYTES} bytes")
        if event:
            await _check(bytes(event))
            yield _HURRY.sub(_A_SECOND, bytes(event))


async def _check(data: bytes) -> None:
    """Raises httpx2.ReadError for what must not be parsed here."""
    if len(data) <= SMALL or not may_exceed(data, MAX_NODES):
        return
    try:
        await pool().run(json_content, data, max_bytes=2 * MAX_ANSWER_BYTES)
    except (Refused, ConfinedError, BusyError) as error:
        raise httpx2.ReadError(str(error)) from None
