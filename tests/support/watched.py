"""Resources of a cluster's processes over time, measured from outside."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil


@dataclass(frozen=True)
class Sample:
    """`at`: seconds since the watch began; resident in bytes; `connections`: the database's, its clients together."""

    at: float
    part: str
    pid: int
    resident: int
    descriptors: int
    children: int


@dataclass
class Watch:
    """Looks at `parts` (their process id, None while they are down) and at the database's connections."""

    parts: Mapping[str, Callable[[], int | None]]
    connections: Callable[[], int]
    samples: list[Sample] = field(default_factory=list)
    connected: list[tuple[float, int]] = field(default_factory=list)
    started: dict[int, psutil.Process] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Takes one sample of each part."""
        at = time.monotonic() - self.began
        self.connected.append((at, self.connections()))
        for name, pid_of in self.parts.items():
            pid = pid_of()
            with contextlib.suppress(psutil.Error, OSError):
                if pid is not None:
                    process = psutil.Process(pid)
                    children = process.children(recursive=True)
                    for each in (process, *children):
                        self.started.setdefault(each.pid, each)
                    resident = process.memory_info().rss
                    self.samples.append(Sample(at, name, pid, resident, process.num_fds(), len(children)))

    def of(self, part: str, since: float = 0.0, until: float = float("inf")) -> list[Sample]:
        """A part's samples between two times."""
        return [sample for sample in self.samples if sample.part == part and since <= sample.at < until]

    def left(self) -> list[int]:
        """Processes that were seen and are still there; for after the end."""
        found = []
        for pid, process in sorted(self.started.items()):
            with contextlib.suppress(psutil.Error):  # not another that has its number by now
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
        return found

    def connections_between(self, since: float, until: float) -> list[int]:
        """Number of the database's connections, while it was up."""
        return [count for at, count in self.connected if since <= at < until and count]


def median(values: Sequence[int]) -> float:
    """0 of none."""
    return statistics.median(values) if values else 0.0
