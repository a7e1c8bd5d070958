"""Engines that outlived their server: they hold memory that the next start needs."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

_TITLE = re.compile(r"\S*::(EngineCore|Worker|DPCoordinator)\b")
"""What vLLM calls its processes: `VLLM::EngineCore`, `VLLM::Worker_TP0`; the prefix is a setting."""
_SERVER = re.compile(r"(^|/)vllm$|^vllm\.|^VLLM")
"""A word of the command that serves: `vllm` itself, a module of it, a title; not a folder on the way to it."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """`memory` and `gpu_memory` in MiB; 0 where no driver reports the GPU's."""

    pid: int
    title: str
    memory: int
    gpu_memory: int

    def __str__(self) -> str:
        on_gpu = f" and {self.gpu_memory} MiB of GPU memory" if self.gpu_memory else ""
        return f"{self.title} (process {self.pid}) holds {self.memory} MiB{on_gpu}"


def orphans() -> Iterator[Orphan]:
    """Engines and workers of vLLM without a server: the parent is no engine and has not loaded torch."""
    on_gpu: dict[int, int] | None = None
    for process in psutil.process_iter():
        try:
            title = process.cmdline()[:1]
            if not title or not _TITLE.match(title[0]) or _has_server(process):
                continue
            memory = process.memory_info().rss >> 20
        except psutil.Error:  # it ended, or belongs to another user
            continue
        on_gpu = _gpu_memory() if on_gpu is None else on_gpu
        yield Orphan(process.pid, title[0], memory, on_gpu.get(process.pid, 0))


def _has_server(process: psutil.Process) -> bool:
    """Whether the parent is a server. An orphan's parent is pid 1, which in a container may be the server."""
    parent = process.parent()
    if parent is None:
        return False
    try:
        words = parent.cmdline()
        if _TITLE.match(" ".join(words)) or any(map(_SERVER.search, words)):
            return True
        return any("libtorch" in each.path for each in parent.memory_maps())
    except psutil.AccessDenied:  # of another user: no server starts its engine as another user
        return False
    except psutil.ZombieProcess:
        return False


def _gpu_memory() -> dict[int, int]:
    """MiB by process, as NVIDIA's driver counts."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = [row for row in csv.reader(text.splitlines()) if len(row) == 2]
    return {int(pid): int(memory) for pid, memory in rows if pid.strip().isdigit() and memory.strip().isdigit()}
