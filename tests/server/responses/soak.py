"""10,000 responses through one server: what stays behind. `python -m tests.server.responses.soak [10000]`, some
minutes.

Each runs a tool and is stored; every tenth is streamed, every twentieth client goes away in the middle. Objects and
memory are those of the server's process, which is also the client's.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
from httpx_sse import connect_sse

from tests.support.responses import fakes
from tests.support.responses.events import check_stream, stream
from tests.support.responses.replay import ReplayEngine
from tests.support.responses.server import MODEL, harmony, running
from tests.support.responses.turns import HELLO, INTERPRETER, PYTHON
from vllm_gptoss.server.responses.options import ResponsesOptions

AT_ONCE = 8


class _Nothing(list[Any]):
    """Keeps no history: what is looked for is what the server keeps."""

    def append(self, value: Any) -> None:
        del value


def main(count: int) -> None:
    first, last = harmony(PYTHON), harmony(HELLO)
    answered = harmony("<|start|>python")

    def script(prompt: Sequence[int]) -> list[int]:
        tail = prompt[-60:]
        has_answer = any(tail[at : at + 2] == answered[:2] for at in range(len(tail)))
        return last if has_answer else first

    engine, tool = ReplayEngine(script), fakes.python()
    engine.prompts, engine.samplings = _Nothing(), _Nothing()
    tool.calls, tool.opened = _Nothing(), _Nothing()
    with tempfile.TemporaryDirectory() as folder:
        config = ResponsesOptions(store=str(Path(folder) / "store.sqlite"))
        with running(engine, config, [tool]) as server, server.http() as http, ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda number: one(http, number), range(500)))
            before = measured()
            done = sum(pool.map(lambda number: one(http, number), range(count)))
            after = measured()
    print(f"{done} of {count} complete; objects {before[0]:,} -> {after[0]:,}; MiB {before[1]:.0f} -> {after[1]:.0f}")
    print(f"running {engine.running}, tool sessions left {len(tool.opened)}")


def one(http: httpx.Client, number: int) -> bool:
    body = {"model": MODEL, "input": f"{number}", "tools": [INTERPRETER]}
    if number % 20 == 5:
        return went_away(http, body)
    if number % 10:
        answer = http.post("/responses", json=body, timeout=120).raise_for_status().json()
        return bool(answer["status"] == "completed" and len(answer["output"]) > 1)
    events = stream(http, body)
    check_stream(events)
    return bool(events[-1]["type"] == "response.completed")


def went_away(http: httpx.Client, body: dict[str, Any]) -> bool:
    with connect_sse(http, "POST", "/responses", json={**body, "stream": True}) as source:
        events = source.iter_sse()
        next(events)
    return True


def measured() -> tuple[int, float]:
    gc.collect()
    return len(gc.get_objects()), psutil.Process().memory_info().rss / 2**20


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
