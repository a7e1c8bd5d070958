"""One sum over two tensor-parallel GPUs in a CUDA graph: the plugin's push, vLLM's custom all-reduce, NCCL.

    python -m benchmarks.all_reduce [--out FILE]

A graph is a chain of 72 pairs, as the 120b has in a step: RMSNorm, then the sum of its output. Times are of one pair,
the best of three series of 20 replays; `norm` is the norm alone. NVLink multicast is off. `push_wrong` counts values
that are not the float32 sum rounded once, `unlike_push` values of a chain that differ from push's.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from benchmarks.timing import replayed, write
from vllm_gptoss.engine import spec
from vllm_gptoss.engine.kernels import all_reduce, norm_rope_router

RANKS, MODEL = 2, spec.GPT_OSS_120B
CALLS, SIZES = 2 * MODEL.layers, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ENVIRONMENT = {"VLLM_PLUGINS": "none", "VLLM_SKIP_P2P_CHECK": "1"}
ENVIRONMENT |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
Sum = Callable[[Tensor, int], Tensor]
"""The sum over the ranks of rows; the integer alternates from call to call."""


def draw(seed: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + tokens)
    return torch.randn(tokens, MODEL.hidden, generator=generator).bfloat16().cuda()


class Rank:
    """One of the two processes."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, device = rank, torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", f"file://{folder}/init", rank=rank, world_size=RANKS, device_id=device)
        self.cpu = dist.new_group(list(range(RANKS)), backend="gloo")
        self.weight = draw(rank, 1)[0].abs() + 0.5

    def gather(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, mine, group=self.cpu)
        return found

    def wrong(self, push: Sum, tokens: int) -> int:
        """Values of six calls that are not the sum. Addends have the word that means "not yet written"."""
        found = 0
        for turn in range(6):
            addends = [draw(10 * turn + rank, tokens) for rank in range(RANKS)]
            for rank, x in enumerate(addends):
                x.view(torch.int32)[0, rank] = -1
            wanted = (addends[0].float() + addends[1].float()).bfloat16()
            got = push(addends[self.rank], turn % 2)
            found += int(((got != wanted) & ~(got.isnan() & wanted.isnan())).sum())
        return found

    def chain(self, x: Tensor, add: Sum | None) -> Tensor:
        for call in range(CALLS):
            y = torch.empty_like(x)
            norm_rope_router.norm(x, None, self.weight, y, None, 1e-5)
            x = add(y, call % 2) if add else y
        return x

    def captured(self, tokens: int, add: Sum | None, around: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        x, stream, graph = draw(7, tokens), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.chain(x, add)
            torch.cuda.synchronize()
            dist.barrier(self.cpu)
            # a thread of NCCL may not end the capture
            with around(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = self.chain(x, add)
        torch.cuda.synchronize()
        return graph, out

    def microseconds(self, graph: torch.cuda.CUDAGraph) -> float:
        dist.barrier(self.cpu)
        return round(replayed(graph, 20) / CALLS, 2)

    def measure(self, row: dict[str, Any], name: str, add: Sum | None, around: Any, first: dict[int, Tensor]) -> None:
        """Adds one kind of sum to a row. first: of each number of tokens, the values of push."""
        graph, out = self.captured(row["tokens"], add, around)
        replayed(graph, 3)
        row[f"{name}_us"] = min(self.microseconds(graph) for _ in range(3))
        if add:
            kept = first.setdefault(row["tokens"], out.clone())
            values = out.view(torch.int16).cpu().numpy().tobytes()
            row.setdefault("ranks_equal", {})[name] = len(set(self.gather(values))) == 1
            row.setdefault("unlike_push", {})[name] = int((kept != out).sum())

    def rows(self) -> list[dict[str, Any]]:
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

        push = all_reduce.connect(self.rank, self.rank, RANKS, MODEL.hidden, self.gather)
        custom = CustomAllreduce(self.cpu, torch.device("cuda", self.rank))
        none, kinds = contextlib.nullcontext, dict[str, Any](norm=None, push=push)
        kinds["nccl"] = lambda x, _: dist.all_reduce(x) or x  # in place; returns nothing
        kinds["custom"] = lambda x, _: custom.custom_all_reduce(x)
        rows: list[dict[str, Any]] = [{"tokens": tokens, "push_wrong": self.wrong(push, tokens)} for tokens in SIZES]
        first: dict[int, Tensor] = {}
        for name, add in kinds.items():
            for row in rows:
                self.measure(row, name, add, custom.capture if name == "custom" else none, first)
        return rows


def together(commands: Sequence[Sequence[str]], seconds: float = 120) -> bool:
    """Runs processes at once; False, and the others are ended, where one fails or the time is over."""
    processes = [subprocess.Popen(command, env=os.environ | ENVIRONMENT) for command in commands]
    end, codes = time.monotonic() + seconds, list[int | None]([None])
    while None in codes and not any(codes) and time.monotonic() < end:
        time.sleep(0.1)
        codes = [process.poll() for process in processes]
    for process in processes:
        process.kill()
        process.wait()
    return codes == [0] * len(processes)


def run_rank(rank: int, folder: Path) -> None:
    """One rank. It ends at once, because NCCL would wait for a peer that failed."""
    try:
        with torch.no_grad():
            rows = Rank(rank, folder).rows()
        if rank == 0:
            write(str(folder / "rows.json"), rows, vllm=importlib.metadata.version("vllm"), gpus=RANKS)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(out: Annotated[Path | None, typer.Option(help="JSON file for the result")] = None) -> None:
    """Measures sums over two GPUs."""
    if torch.cuda.device_count() < RANKS or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("needs two sm90 GPUs (H100, H200)")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.all_reduce"]
        if not together([[*command, str(rank), folder] for rank in range(RANKS)]):
            raise SystemExit("a rank failed, or the time was over")
        result = json.loads((Path(folder) / "rows.json").read_text())
    result["command"] = " ".join(["python -m benchmarks.all_reduce", *sys.argv[1:]])
    print(*result["rows"], sep="\n")
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 3 and Path(sys.argv[2]).is_dir():
        run_rank(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        typer.run(main)
