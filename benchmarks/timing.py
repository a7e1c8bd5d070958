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


def write(path: str, rows: list[dict[str, Any]]) -> None:
    """Rows with what produced them: GPU, torch, date and command."""
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "command": " ".join([f"python benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "rows": rows,
    }
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def on_hopper(main: Callable[[], None]) -> None:
    """Runs a benchmark without gradients, or ends with the reason why not."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("these kernels need an sm90 GPU (H100, H200)")
    with torch.no_grad():
        main()
