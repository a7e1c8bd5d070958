"""Measures pauses of the API server's event loop: a metric for each, a log line for long ones.

During a pause no token is sent and no request is accepted. The endpoint plugin starts one watch per API server process.
"""

from __future__ import annotations

import asyncio
import logging
import time

from prometheus_client import Histogram

logger = logging.getLogger(__name__)

_TICK_S = 0.05
LONG_S = 1.0
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

PAUSE_SECONDS = Histogram(
    "gptoss_event_loop_pause_seconds", "How much later than due the event loop ran, 20 times a second", buckets=_BUCKETS
)


class LoopWatch:
    """Watches the running event loop from `start` until `aclose`."""

    def __init__(self, tick_s: float = _TICK_S, long_s: float = LONG_S) -> None:
        self._tick_s = tick_s
        self._long_s = long_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="gptoss event loop watch")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while True:
            due, used = time.monotonic() + self._tick_s, time.process_time()
            await asyncio.sleep(self._tick_s)
            pause = max(0.0, time.monotonic() - due)
            PAUSE_SECONDS.observe(pause)
            if pause >= self._long_s:
                # Little processor time means that the process waited for a processor or the disk.
                logger.warning(
                    "the event loop was blocked for %.1f s, in which this process used %.1f s of processor time",
                    pause,
                    time.process_time() - used,
                )
