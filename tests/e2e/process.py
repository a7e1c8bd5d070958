"""Resources of a running server, measured from outside."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Held:
    """A server's children of all generations by name, its open descriptors and sockets, its own memory."""

    children: dict[int, str]
    descriptors: int
    sockets: int
    resident: int  # bytes

    @property
    def summary(self) -> str:
        processes = f"{len(self.sandboxed)} sandboxed processes, {len(self.others)} others"
        return f"{processes}, {self.descriptors} descriptors, {self.sockets} sockets, {self.resident >> 20} MiB"

    @property
    def others(self) -> list[int]:
        """Servers over stdio, and what starts sandboxes and workers. Confined workers come and go."""
        workers = {pid for pid, command in self.children.items() if "tools.confined import worker" in command}
        return sorted(set(self.children) - set(self.sandboxed) - workers)

    @property
    def sandboxed(self) -> list[int]:
        """The fork server of the python tool and all that came from it."""
        return [pid for pid, command in self.children.items() if "gptoss_sandbox" in command]


def held(pid: int) -> Held:
    process = psutil.Process(pid)
    links = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry.path))
    sockets = sum(link.startswith("socket:") for link in links)
    return Held(children(process), len(links), sockets, process.memory_info().rss)


def children(process: psutil.Process) -> dict[int, str]:
    found = {}
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[child.pid] = " ".join(child.cmdline())
    return found


def settled(pid: int, enough: Callable[[Held], bool], patience: float = 15) -> Held:
    """Resources once `enough` is true, or after `patience` seconds."""
    began = time.monotonic()
    while not enough(now := held(pid)) and time.monotonic() - began < patience:
        time.sleep(0.1)
    return now
