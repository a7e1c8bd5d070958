"""Measures pauses of the API server's event loop: a metric for each, a log line for long ones.

During a pause no token is sent and no request is accepted. The endpoint plugin starts one watch per API server process.
"""

from __future__ import annotations

import asyncio
import logging
import time

from prometheus_client import Histogram

logger = logging.getLogger(__name__)

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

PAUSE_SECONDS = Histogram(
    "gptoss_event_loop_pause_seconds", "How much later than due the event loop ran, 20 times a second", buckets=_BUCKETS
)


async def watch_loop(tick_s: float = 0.05, long_s: float = 1.0) -> None:
    """Observes the running event loop every `tick_s` until it is cancelled; logs pauses of `long_s` and more."""
    while True:
        due, used = time.monotonic() + tick_s, time.process_time()
        await asyncio.sleep(tick_s)
        pause = max(0.0, time.monotonic() - due)
        PAUSE_SECONDS.observe(pause)
        if pause >= long_s:
            # Little processor time means that the process waited for a processor or the disk.
            logger.warning(
                "the event loop was blocked for %.1f s, in which this process used %.1f s of processor time",
                pause,
                time.process_time() - used,
            )
