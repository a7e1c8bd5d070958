"""Reads WebSocket data in slices: 256 KiB of pings, which uvicorn answers one by one, stopped the event loop for 1.6 s.

A connection with slow slices waits between them. All such connections share a fifth of the event loop's time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

SLICE = 2048
"""Bytes: 340 pings take 12 ms, a text message of this size 20 µs."""

SLOW_S, RESTS = 1e-3, 4
"""Seconds after which a slice is slow; the wait before the next one, as a multiple of its time."""


class _Slices:
    """The unread data of one connection. `take` is uvicorn's `data_received`."""

    free_at = 0.0  # of all connections

    def __init__(self, protocol: Any, take: Callable[[Any, bytes], None]) -> None:
        self._protocol = protocol
        self._take = take
        self._data = bytearray()
        self._is_slow = self._waits = False

    def add(self, data: bytes) -> None:
        self._data += data
        if self._waits:
            self._pause()
        else:
            self._next()

    def _next(self) -> None:
        self._waits = False
        part = bytes(self._data[:SLICE])
        del self._data[:SLICE]
        began = time.perf_counter()
        self._take(self._protocol, part)
        used = time.perf_counter() - began
        self._is_slow = used > SLOW_S
        now = self._protocol.loop.time()
        if self._is_slow:
            _Slices.free_at = max(now, _Slices.free_at) + RESTS * used
        if self._protocol.disconnected or not self._data:
            with contextlib.suppress(RuntimeError):  # the connection is closing
                if not self._protocol.read_paused:
                    self._protocol.transport.resume_reading()
            return
        self._pause()
        self._protocol.loop.call_at(_Slices.free_at if self._is_slow else now, self._next)

    def _pause(self) -> None:
        self._waits = True
        with contextlib.suppress(RuntimeError):
            self._protocol.transport.pause_reading()


def read_in_slices() -> None:
    """Installs the slices in uvicorn's WebSocket protocol, or warns if it is an unknown one. Idempotent."""
    from uvicorn.protocols.websockets import auto

    protocol: Any = auto.AutoWebSocketsProtocol
    theirs = getattr(protocol, "data_received", None)
    if getattr(protocol, "__name__", "") != "WebSocketsSansIOProtocol" or theirs is None:
        logger.warning("WebSocket frames are not read in slices: uvicorn's protocol is %r", protocol)
    elif not hasattr(theirs, "__wrapped__"):
        protocol.data_received = _sliced(theirs)


def _sliced(theirs: Callable[[Any, bytes], None]) -> Callable[[Any, bytes], None]:
    @functools.wraps(theirs)
    def data_received(self: Any, data: bytes) -> None:
        if not hasattr(self, "gptoss_slices"):
            self.gptoss_slices = _Slices(self, theirs)
        self.gptoss_slices.add(data)

    return data_received
