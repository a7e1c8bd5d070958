"""attention_many.cu compiled to `compute_80` PTX and run on Hopper, against vLLM's Triton attention there.

    python benchmarks/sm80_attention.py [--requests 1,12,64,256] [--keys 1000,16000] [--out FILE] [--seconds 80]

A decode step of one token a request, 64 heads, sinks, keys cold in L2, as benchmarks/attention.py has it. A
multiprocessor holds as many blocks as one with the shared memory of other GPUs would (`sm80_plan.py`). Only the ratio
to Triton attention on the same GPU is meant. `least`: keys that a piece of a request has at least. `native` is the
kernel as the plugin runs it on Hopper. `held`: a kernel occupies all but 82 multiprocessors.

Errors are relative, in the norm, against benchmarks/reference.py in float64.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from attention import BLOCK, BLOCKS, HEAD, HEADS, KV_HEADS, LONGEST, Step
from sm80_plan import KIB, LIMITS
from sm80_run import ARCH, GRIDS, REPEATS, Clock, collect, error, parser, ratio, show
from timing import on_hopper
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import reference
from vllm_gptoss.engine import spec
from vllm_gptoss.engine.kernels import attention, attention_many, nvrtc
from vllm_gptoss.engine.kernels.attention_many import AttentionManyArgs, ManyPlan

HOPPER = 228 * KIB
"""Shared memory of its multiprocessors."""


def triton(step: Step) -> Callable[..., None]:
    """vLLM's Triton attention as its backend calls it in a captured decode step."""
    from vllm.v1.attention.backends.triton_attn import MIN_LAUNCH_GRID_SIZE_2D, NUM_PAR_SOFTMAX_SEGMENTS
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    threshold = MIN_LAUNCH_GRID_SIZE_2D // KV_HEADS  # itself a size of a captured graph
    segments = (threshold, HEADS, NUM_PAR_SOFTMAX_SEGMENTS)
    sums = torch.empty(*segments, HEAD, device="cuda")
    maxima, denominators = torch.empty(segments, device="cuda"), torch.empty(segments, device="cuda")
    key, value = step.cache.transpose(1, 2).split(HEAD, dim=-1)
    q, out = step.q.unflatten(-1, (-1, HEAD)), step.out.unflatten(-1, (-1, HEAD))
    one = torch.ones(1, device="cuda").expand(step.tokens, KV_HEADS)

    def run(tables: list[Tensor] = step.chain) -> None:
        for table in tables:
            unified_attention(
                q=q, k=key, v=value, out=out, cu_seqlens_q=step.starts, max_seqlen_q=1, seqused_k=step.lens,
                max_seqlen_k=LONGEST, softmax_scale=HEAD**-0.5, causal=True,
                window_size=(step.window - 1, 0) if step.window else (-1, -1), block_table=table, softcap=0,
                q_descale=None, k_descale=one, v_descale=one, seq_threshold_3D=threshold,
                num_par_softmax_segments=NUM_PAR_SOFTMAX_SEGMENTS, softmax_segm_output=sums,
                softmax_segm_max=maxima, softmax_segm_expsum=denominators, sinks=step.sinks,
            )  # fmt: skip

    return run


@functools.cache
def kernel_of(plan: ManyPlan) -> tuple[nvrtc.Kernel, int]:
    """The kernel as PTX, and the shared memory with which a multiprocessor of Hopper holds just the plan's blocks."""
    shared = (HOPPER // plan.blocks - KIB - 256) // 128 * 128
    return nvrtc.load(0, attention_many.SOURCE, ARCH, plan.macros).kernel("attention_many", shared), shared


def ours(step: Step, plan: ManyPlan, multiprocessors: int) -> Callable[..., None]:
    """attention_many with pieces for so many multiprocessors."""
    kernel, shared = kernel_of(replace(plan, least=512))
    slots = plan.slots(multiprocessors, KV_HEADS)

    def run(tables: list[Tensor] = step.chain) -> None:
        for table in tables:
            tensors = (step.q, step.cache, step.sinks, table, step.lens, step.starts, step.out)
            args = AttentionManyArgs(
                **attention.described(*tensors, HEAD**-0.5),
                parts=attention.parts(0, slots).data_ptr(),
                arrived=attention.arrived(0, KV_HEADS).data_ptr(),
                tokens=step.tokens, slots=slots, least=plan.least, padded=0,
            )  # fmt: skip
            grid = step.tokens * KV_HEADS + (0 if plan.window else slots)
            kernel(grid, plan.warps * 32, [args], shared, dependent=False)

    return run


def attention_error(step: Step, run: Callable[..., None]) -> float:
    """The largest of the first and the last request's outputs."""
    step.out.fill_(math.nan)
    run(step.chain[:1])
    errors = []
    for request in {0, step.tokens - 1}:
        length = int(step.lens[request])
        blocks = step.chain[0][request, : -(-length // BLOCK)].long()
        rows = step.cache[blocks].transpose(1, 2).reshape(-1, KV_HEADS, 2 * HEAD)[:length].double()
        q = step.q[request].view(1, HEADS, HEAD).double()
        sinks, window = step.sinks.double(), step.window or None
        true = reference.sink_attention(q, rows[..., :HEAD], rows[..., HEAD:], sinks, window=window)
        errors.append(error(step.out[request].view(1, HEADS, HEAD), true))
    return torch.tensor(errors).max().item()  # NaN if one is


def measure(step: Step, keys: int, clock: Clock) -> Iterator[dict[str, Any]]:
    """Rows of a step: one for each limit of shared memory and `least`."""
    repeats = 5 if step.bytes > 1e9 else REPEATS
    stock, fewer = triton(step), GRIDS[0]

    def timed(run: Callable[..., None], left: int = 0) -> float | None:
        return clock.microseconds(run, len(step.chain), left, repeats)

    common: dict[str, Any] = {"requests": step.tokens, "keys": keys, "window": step.window}
    common |= {"triton_error": attention_error(step, stock), "triton_us": timed(stock)}
    common |= {"triton_held_us": timed(stock, fewer), "native_us": timed(step.ours)}
    for limit, arch in sorted({limit: arch for arch, limit in LIMITS.items()}.items()):
        for least in (512,) if step.window or step.tokens > 16 else (128, 512):
            plan = replace(attention_many.plan(step.tokens, step.window, arch=arch), least=least)
            run = ours(step, plan, clock.count)
            row = {"shared": limit, "blocks": plan.blocks, "least": least, "error": attention_error(step, run)}
            row |= {"us": timed(run), "held_us": timed(ours(step, plan, fewer), fewer)}
            row["ratio"] = ratio(common["triton_us"], row["us"])
            yield {**common, **row, "ratio_held": ratio(common["triton_held_us"], row["held_us"])}


COLUMNS = ("requests", "keys", "window", "shared", "least", "us", "native_us", "triton_us", "ratio", "ratio_held")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--requests", default="1,12,64,256")
    made.add_argument("--keys", default="1000,16000")
    options = made.parse_args()
    cache = torch.empty(BLOCKS, BLOCK, KV_HEADS, 2 * HEAD, device="cuda", dtype=torch.bfloat16)
    for part in cache.split(20_000):
        part.normal_()
    order, clock = torch.randperm(BLOCKS, device="cuda").int(), Clock()
    cases = [
        (int(requests), keys, window)
        for keys in options.keys.split(",")
        for window in (0, spec.WINDOW)
        for requests in options.requests.split(",")
    ]
    rows = (
        row
        for requests, keys, window in cases
        for row in measure(Step(cache.transpose(1, 2), order, requests, keys, window), int(keys), clock)
    )
    show(collect(options, rows), COLUMNS, "triton_error")


if __name__ == "__main__":
    on_hopper(main)
