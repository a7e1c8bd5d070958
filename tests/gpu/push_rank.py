"""One rank of two that sum by `all_reduce` on two GPUs: `python -m tests.gpu.push_rank RANK FOLDER MODE`.

MODE is `sums`, or `alone`: rank 1 connects and then never calls. Prints one JSON line.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vllm_gptoss.engine.kernels import all_reduce

COLUMNS, RANKS, PATIENCE_S = 2880, 2, 2
SIZES = (1, 512, 3, 17, 1, 64, 256, 2)
"""Rows of calls in succession: smaller ones follow larger ones."""
CHAINS = (1, 40, 512)
REPLAYS = 600


def draw(rank: int, tokens: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * turn + 10 * tokens + rank)
    x = torch.randn(tokens, COLUMNS, generator=generator).bfloat16()
    x.view(torch.int32)[0, rank] = -1  # the word that means "not yet written"
    return x.cuda()


def wrong(reduce: all_reduce.PushAllReduce) -> int:
    """Values of eager calls that are not the sum in the order of the ranks, rounded once."""
    found = 0
    for turn, tokens in enumerate(SIZES * 4):
        addends = [draw(rank, tokens, turn) for rank in range(RANKS)]
        got = reduce(addends[reduce.rank], turn % 2)
        wanted = (addends[0].float() + addends[1].float()).bfloat16()
        found += int(((got != wanted) & ~(got.isnan() & wanted.isnan())).sum())
    return found


def unlike(reduce: all_reduce.PushAllReduce, gather: all_reduce.Gather) -> int:
    """Replays of graphs, of several sizes in no order, whose result differs from that of eager calls or of the peer."""

    def chain(x: Tensor) -> Tensor:
        for turn in range(8):
            x = reduce(x * 0.5, turn % 2)
        return x

    graphs = []
    for tokens in CHAINS:
        x = torch.randn(tokens, COLUMNS, generator=torch.Generator().manual_seed(reduce.rank)).bfloat16().cuda()
        wanted = chain(x).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            got = chain(x)
        graphs.append((graph, x, got, wanted))
    torch.cuda.synchronize()
    order, late, found = random.Random(0), random.Random(reduce.rank), 0
    for _ in range(REPLAYS):
        graph, x, got, wanted = graphs[order.randrange(len(graphs))]
        if late.random() < 0.05:
            time.sleep(0.002)
        if order.random() < 0.1:
            found += not torch.equal(chain(x), wanted)
        got.zero_()
        graph.replay()
        found += not torch.equal(got, wanted)
    sums = gather([each[3].view(torch.int16).cpu().tolist() for each in graphs])
    return found + (sums[0] != sums[1])


def waited(reduce: all_reduce.PushAllReduce, gather: all_reduce.Gather, done: Path) -> float:
    """Seconds after which a call without the peer's raises; this process has no GPU then."""
    reduce.kernel = all_reduce.kernel(reduce.device, RANKS, PATIENCE_S)
    gather(None)
    began = time.monotonic()
    if reduce.rank == 1:
        while not done.exists() and time.monotonic() - began < 60:
            time.sleep(0.1)
        return 0.0
    reduce(draw(0, 1, 0), 0)
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return time.monotonic() - began
    finally:
        done.touch()
    return -1.0


def main(rank: int, folder: Path, mode: str) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    torch.zeros(1, device="cuda")
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=RANKS)

    def gather(item: Any) -> list[Any]:
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, item)
        return found

    reduce = all_reduce.connect(rank, rank, RANKS, COLUMNS, gather)
    if mode == "alone":
        return {"seconds": waited(reduce, gather, folder / "done")}
    found = {"wrong": wrong(reduce), "unlike": unlike(reduce, gather)}
    gather(None)  # a rank that ends takes its memory with it
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])), flush=True)
