"""The longest pause of the event loop, without the time in which other programs had the processor.

A pause counts as the smaller of the wall clock and the processor time of this process' threads between two ticks: what
the loop, or a thread that holds the interpreter's lock, did. On a machine that others use too, the wall clock alone
measures them.

A collection of garbage counts as well, but only over what the block makes: what a process of tests has imported by then
takes 0.3 s to go through, where vLLM is among it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

_TICK_S = 0.002


@dataclass
class Watch:
    """Seconds."""

    longest: float = 0.0


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[Watch]:
    """Watches while the block runs."""
    watch = Watch()
    gc.freeze()

    async def tick() -> None:
        while True:
            began, used = time.monotonic(), time.process_time()
            await asyncio.sleep(_TICK_S)
            pause = min(time.monotonic() - began - _TICK_S, time.process_time() - used)
            watch.longest = max(watch.longest, pause)

    task = asyncio.create_task(tick())
    await asyncio.sleep(0)
    try:
        yield watch
        await asyncio.sleep(2 * _TICK_S)
    finally:
        task.cancel()


async def shortest_pause(run: Callable[[], Awaitable[object]], most: float) -> float:
    """The longest pause in seconds of the best of three runs of `run`; the first run below `most` is the last.

    Code that stops the loop stops it in every run; a machine that other programs use does not.
    """
    pauses = []
    for _ in range(3):
        async with watched() as loop:
            await run()
        pauses.append(loop.longest)
        if loop.longest < most:
            break
    return min(pauses)
