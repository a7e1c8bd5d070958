"""How the benchmarks of single kernels measure."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

BYTES_PER_SECOND = 4.3e12
"""What a device-to-device copy moves on an H200."""


def microseconds(work: Callable[[], Any], launches: int, repeats: int = 20) -> float:
    """Median time of one launch in a replayed graph of `launches`."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times[2:])
