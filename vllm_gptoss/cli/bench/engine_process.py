"""The engine's process of a running `vllm serve`: where it is, its processor time, and neighbours on its core."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

TITLE = "VLLM::EngineCor"
"""What `set_process_title` of vLLM leaves of an engine's name: Linux keeps 15 characters."""
BUSY = "while True: pass"


def find(port: int) -> psutil.Process | None:
    """The engine behind the server on `port` of this machine; None where there is none, or it is another user's.

    One API server listens itself and has the engine as a child. Several are children of the process that has it.
    """
    listeners = {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid
    }
    parents = set()
    for pid in listeners:
        with contextlib.suppress(psutil.Error):
            parents.add(psutil.Process(pid).ppid())
    for among in (listeners, parents):
        for process in psutil.process_iter(["name", "ppid"]):
            if (process.info["name"] or "").startswith(TITLE) and process.info["ppid"] in among:
                return process
    return None


def processor_time(engine: psutil.Process) -> tuple[float, float] | None:
    """Seconds of the processor that its first thread, the engine's loop, has had, and all others together.

    From `/proc/PID/task/*/schedstat`, in nanoseconds (`Documentation/scheduler/sched-stats.rst` of Linux); None where
    the kernel does not count. A thread that ended is in neither.
    """
    loop = others = 0
    for thread in _threads(engine):
        try:
            spent = int(Path(f"/proc/{engine.pid}/task/{thread}/schedstat").read_text().split()[0])
        except (OSError, IndexError, ValueError):
            continue
        if thread == engine.pid:
            loop = spent
        else:
            others += spent
    return (loop / 1e9, others / 1e9) if loop else None


@contextlib.contextmanager
def crowded(engine: psutil.Process, neighbours: int) -> Iterator[int]:
    """Binds all threads of `engine` to one core, which `neighbours` processes that never rest share: a slow host.

    Gives the core. Afterwards the threads may run where they could before.
    """
    before = {thread: os.sched_getaffinity(thread) for thread in _threads(engine)}
    core = max(before[engine.pid])
    command = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\n{BUSY}"]
    processes = []
    try:
        for thread in before:
            _bind(thread, {core})
        processes = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for _ in range(neighbours)]
        yield core
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for thread in _threads(engine):
            _bind(thread, before.get(thread, before[engine.pid]))


def _threads(engine: psutil.Process) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{engine.pid}/task")]
    return []


def _bind(thread: int, cores: set[int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended
        os.sched_setaffinity(thread, cores)
