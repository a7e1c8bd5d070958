"""What the API server's process sets for itself once it serves gpt-oss: less work for each streamed token.

A part of the endpoint plugin (`server/parts.py`), once per API server process.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

from vllm_gptoss import _vllm
from vllm_gptoss.server.streaming.loop_watch import LoopWatch

logger = logging.getLogger(__name__)

YOUNG = 20_000
"""Objects made, less those freed, before the collector looks at the young ones; Python's default is 700.

One step of 256 requests makes thousands that are all freed when their tokens are sent. Looking at them meanwhile finds
nothing, and makes them old: the collector took 5 % of the process's time (perf, 256 streams of `/v1/responses`).
"""


def settle() -> None:
    """Idempotent; says in one line what it set."""
    gc.set_threshold(max(YOUNG, gc.get_threshold()[0]), *gc.get_threshold()[1:])
    _vllm.cache_environment()
    logger.info(
        "Streams: text is framed by the plugin and sent as vLLM hands it out, the collector waits for %d objects,"
        " vLLM's variables are read once (GPTOSS_HOST=stock leaves all of it as vLLM has it).",
        YOUNG,
    )


class Host:
    """A part of the endpoint plugin: the watch of the event loop, and `settle` unless `GPTOSS_HOST=stock`."""

    def __init__(self) -> None:
        self._is_lean = False
        self._watch = LoopWatch()

    def attach(self, app: Any, args: Any, settings: Any) -> None:
        del app, args
        self._is_lean = settings.host != "stock"

    async def start(self, engine_client: Any, state: Any, args: Any) -> None:
        del engine_client, state, args
        self._watch.start()
        if self._is_lean:
            settle()
