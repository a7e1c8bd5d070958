"""How the benchmarks of single kernels measure."""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BYTES_PER_SECOND = 4.3e12
"""What a device-to-device copy moves on an H200."""


def captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replayed(graph: torch.cuda.CUDAGraph, times: int = 1) -> float:
    """Microseconds of one of so many replays."""
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / times


def microseconds(work: Callable[[], Any], launches: int, repeats: int = 20) -> float:
    """Median time of one launch in a replayed graph of `launches`."""
    graph = captured(work)
    times = [replayed(graph) / launches for _ in range(repeats + 2)]
    return statistics.median(times[2:])


def hot_microseconds(work: Callable[[], Any], launches: int, seconds: float) -> float:
    """Time of one launch after `seconds` of nothing else. A GPU at its power limit runs at a lower clock than one that
    has rested, by up to a fifth for the experts (docs/kernels/experiments.md)."""
    graph = captured(work)
    each = replayed(graph)
    replayed(graph, max(1, int(seconds * 1e6 / each)))
    return replayed(graph, max(1, int(0.3e6 / each))) / launches


def write(path: str, rows: list[dict[str, Any]], **about: Any) -> None:
    """Rows with what produced them: GPU, torch, date and command, and `about`."""
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "command": " ".join([f"python benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        **about,
        "rows": rows,
    }
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def on_hopper(main: Callable[[], None]) -> None:
    """Runs a benchmark without gradients, or ends with the reason why not."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("these kernels need an sm90 GPU (H100, H200)")
    with torch.no_grad():
        main()
