"""What `sm80_experts.py` and `sm80_attention.py` share: the clock, GPUs with fewer multiprocessors, the rows."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from sm80_plan import KIB
from timing import captured, write
from torch import Tensor

from vllm_gptoss.engine.kernels import experts, nvrtc

ARCH = "compute_80"
"""PTX, which the driver compiles for this GPU."""
GRIDS = (82, 108, 128)
"""Multiprocessors of an RTX 3090, an A100 and a 4090."""
REPEATS = 12
LARGEST_ERROR = 0.01
"""Relative, in the norm: three to four times the rounding of activations, weights of keys and outputs to bf16."""
HOLD = """
extern "C" __global__ void __launch_bounds__(1024) hold(const volatile int* stop, unsigned* at, long long limit) {
  if (threadIdx.x == 0) {
    unsigned sm;
    long long begin, now;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    at[blockIdx.x] = sm;
    do {
      __nanosleep(2000);
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (!*stop && now - begin < limit);
  }
  __syncthreads();
}
"""
HOLD_BYTES, HOLD_SECONDS = 227 * KIB, 1.5


class Clock:
    """Times graphs, on all multiprocessors or with some of them occupied."""

    def __init__(self) -> None:
        self.count = torch.cuda.get_device_properties(0).multi_processor_count
        self.kernel = nvrtc.Module(nvrtc.cubin(HOLD, "sm_90"), 0).kernel("hold", HOLD_BYTES)
        self.stop = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.at = torch.zeros(self.count, dtype=torch.int32, device="cuda")
        self.side = torch.cuda.Stream()

    def microseconds(
        self, work: Callable[[], Any], launches: int, left: int = 0, repeats: int = REPEATS
    ) -> float | None:
        """Median of one launch of a graph of `launches`, of queued replays.

        left: multiprocessors that are free, 0: all; None is returned where the others were not occupied all the time.
        """
        graph, held = captured(work), self.count - left if left else 0
        graph.replay()
        marks = [torch.cuda.Event(True) for _ in range(repeats + 3)]
        self.stop.zero_()
        self.at.fill_(-1)
        torch.cuda.synchronize()
        begin = time.monotonic()
        if held:
            self.hold(held)
        for mark in marks:
            mark.record()
            graph.replay()
        self.stop.fill_(1)
        torch.cuda.synchronize()
        if held and (time.monotonic() - begin > HOLD_SECONDS or len(set(self.at[:held].tolist()) - {-1}) < held):
            return None
        times = [a.elapsed_time(b) * 1e3 / launches for a, b in itertools.pairwise(marks[2:])]
        return statistics.median(times)

    def hold(self, count: int) -> None:
        """Occupies so many multiprocessors until `stop` is set, by blocks that need all of one's shared memory."""
        arguments = [experts.pointer(self.stop), experts.pointer(self.at), ctypes.c_longlong(int(HOLD_SECONDS * 1e9))]
        with torch.cuda.stream(self.side):
            self.kernel(count, 1024, arguments, HOLD_BYTES, dependent=False)
        time.sleep(0.003)


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def ratio(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs and ours else None


def parser(about: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seconds", type=float, default=100, help="no new row is begun after so long")
    made.add_argument("--out", default="")
    return made


def collect(options: argparse.Namespace, found: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows until the time is over. After each, the file has all rows so far."""
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    for row in found:
        rows.append(row)
        print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
        if options.out:
            versions = {name: importlib.metadata.version(name) for name in ("vllm", "triton")}
            write(options.out, rows, **versions, nvrtc=".".join(map(str, nvrtc.version())))
        if time.monotonic() - begin > options.seconds:
            print(f"stopped after {options.seconds} s", flush=True)
            break
    return rows


def show(rows: Sequence[dict[str, Any]], columns: Sequence[str], theirs: str) -> None:
    """A short table. Exits with an error where a kernel of ours is wrong."""
    for row in [dict(zip(columns, columns, strict=True)), *rows]:
        cells = (row[name] for name in columns)
        print(
            " ".join(
                f"{f'{cell:.2f}' if isinstance(cell, float) else str(cell):>{len(name)}}"
                for name, cell in zip(columns, cells, strict=True)
            )
        )
    print("largest error: ours", max(row["error"] for row in rows), "vLLM's", max(row[theirs] for row in rows))
    if not all(row["error"] < LARGEST_ERROR for row in rows):
        raise SystemExit(f"an error is above {LARGEST_ERROR}")
