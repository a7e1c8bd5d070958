"""Waiting for what happens soon, such as a process's end, without a fixed sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path


def soon(what: Callable[[], bool], seconds: float = 60.0, pause: float = 0.005) -> float:
    """Seconds until `what` is true; fails after `seconds`, a bound for an event that never happens, not a target.
    pause: seconds between two looks; a look that costs much would slow the event down."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < seconds, "it did not happen in time"
        time.sleep(pause)
    return time.monotonic() - began


async def until(what: Callable[[], object], seconds: float = 60.0) -> None:
    """`soon` for an event loop, without blocking it.

    Raises:
        TimeoutError: it did not happen.
    """
    async with asyncio.timeout(seconds):
        while not what():
            await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    """A zombie is not: its parent may never reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
