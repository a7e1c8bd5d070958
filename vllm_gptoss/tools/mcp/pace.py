"""Limits the messages per second that an MCP server sends without a request: first reading pauses, then it disconnects.

The transports hold one message at a time, so a server that sends faster waits in its own socket or pipe.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

_REQUEST, _BYTES = 5, 4096  # a request is answered, which over HTTP costs us a request


class FloodError(Exception):
    """The server sent more than it may for too long; the message is the reason."""


class Pace:
    """A token bucket for one connection. A notification costs 1, a request 5, and each 4 KiB 1 more.

    `rate`: tokens a second; ten seconds' worth may come at once. `patience`: seconds that a server may wait in a row.
    """

    def __init__(self, rate: float, patience: float) -> None:
        self._rate = rate
        self._patience = patience
        self._tokens = 10 * rate
        self._at = time.monotonic()
        self._waits_since: float | None = None

    async def take(self, message: Any) -> None:
        """Waits until `message`, as a transport of the `mcp` package reads it, may be handled. Raises FloodError."""
        content: Any = getattr(message, "message", None)
        if not hasattr(content, "method"):
            return  # the answer to our request
        cost = (_REQUEST if hasattr(content, "id") else 1) + len(str(content.params or "")) // _BYTES
        now = time.monotonic()
        self._tokens = min(10 * self._rate, self._tokens + (now - self._at) * self._rate) - cost
        self._at = now
        if self._tokens >= 0:
            self._waits_since = None
            return
        if self._waits_since is None:
            self._waits_since = now
        if now - self._waits_since > self._patience:
            raise FloodError(f"the server sends more than {self._rate:g} messages a second unasked (max_unasked_per_s)")
        await asyncio.sleep(-self._tokens / self._rate)
