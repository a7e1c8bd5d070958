"""Kills confined workers as the kernel does when memory runs out: by SIGKILL at any point."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from vllm_gptoss.tools.confined.nursery import Nursery


def kill_workers(nursery: Nursery) -> int:
    """Kills every worker of a fork server, idle ones too, and returns how many; the fork server stays."""
    assert nursery.pid is not None
    workers = [pid for pid in _descendants(nursery.pid) if not _is_first(pid)]
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(workers)


def _descendants(pid: int) -> list[int]:
    return [found for child in _children(pid) for found in (child, *_descendants(child))]


def _is_first(pid: int) -> bool:
    """Whether it is the first process of a pid namespace, as the fork server is where namespaces are allowed."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the latter: it ended while it was read
        status = Path(f"/proc/{pid}/status").read_text()
        return next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1] == "1"
    return True


def _children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
