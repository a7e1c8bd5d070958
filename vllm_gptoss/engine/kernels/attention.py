"""Host side of `cuda/attention_few.cu`: attention with sinks for a step of few tokens, sm_90.

docs/kernels/ has the design and the numbers, `engine/choose/measured.py` says where it was measured.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gptoss.engine.kernels import nvrtc
from vllm_gptoss.engine.kernels.dense import cache_described

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).parent / "cuda" / "attention_few.cu"
GROUP = 8
"""Query heads per key/value head."""
HEAD = 64
LEAST_BLOCK = 16
"""Tokens of the smallest cache block that vLLM makes for FlashAttention."""
MAX_SPLITS = 8
"""Blocks of one cluster at most (the portable limit)."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Compile-time macros of one launch. window: keys a token sees, itself included; 0: all."""

    splits: int
    warps: int
    window: int

    @property
    def macros(self) -> dict[str, int]:
        return {
            "SPLITS": self.splits,
            "WARPS": self.warps,
            "WINDOW": self.window,
        }


def unsupported(query_heads: int, kv_heads: int, head: int, block_size: int) -> str | None:
    """Why this shape has no kernel, or None. block_size: tokens per block of the paged cache."""
    if head != HEAD:
        return f"head size {head}, not {HEAD}"
    if query_heads != GROUP * kv_heads or not kv_heads:
        return f"{query_heads} query heads for {kv_heads} key/value heads, not {GROUP} each"
    if block_size & (block_size - 1):
        return f"cache blocks of {block_size} tokens, not a power of two"
    return None


@functools.cache
def plan(tokens: int, kv_heads: int, window: int) -> AttentionPlan:
    """How the keys are shared out: enough blocks to cover the multiprocessors, not so many that they queue.

    A window of at most 128 keys is one chunk of 16 for each of 8 warps, so it is never split.
    """
    if 0 < window <= 128:
        return AttentionPlan(1, 8, window)
    splits = MAX_SPLITS
    while splits > 2 and splits * tokens * kv_heads > 128:
        splits //= 2
    return AttentionPlan(splits, 8, window)


class Args(ctypes.Structure):
    """`struct Args` of attention_few.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "kv", "out", "sinks", "block_table", "seq_lens", "query_start")),
        *((name, ctypes.c_longlong) for name in ("kv_block", "kv_head", "kv_token")),
        *(
            (name, ctypes.c_int)
            for name in ("kv_heads", "requests", "table_stride", "block_shift", "q_stride", "out_stride")
        ),
        ("scale", ctypes.c_float),
    ]


@functools.cache
def kernel(device: int, plan: AttentionPlan) -> nvrtc.Kernel:
    """The kernel of a plan, compiled and loaded.

    Raises:
        NvrtcError: the compiler or the driver refused.
    """
    return nvrtc.load(device, SOURCE, "sm_90", plan.macros).kernel("attention_few", 0)


def described(
    q: Tensor,
    kv_cache: Tensor,
    sinks: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    out: Tensor,
    scale: float,
) -> dict[str, int | float]:
    """What the `Args` of both kernels say of the tensors of `attend`, by field."""
    return {
        "q": q.data_ptr(),
        **cache_described(kv_cache),
        "out": out.data_ptr(),
        "sinks": sinks.data_ptr(),
        "block_table": block_table.data_ptr(),
        "seq_lens": seq_lens.data_ptr(),
        "query_start": query_start.data_ptr(),
        "kv_heads": kv_cache.shape[1],
        "requests": seq_lens.shape[0],
        "table_stride": block_table.stride(0),
        "q_stride": q.stride(0),
        "out_stride": out.stride(0),
        "scale": scale * math.log2(math.e),
    }


def attend(
    q: Tensor,
    kv_cache: Tensor,
    sinks: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    out: Tensor,
    scale: float,
    window: int,
    tuned: AttentionPlan | None = None,
) -> None:
    """Causal attention of every token over the cached keys of its request, with one sink logit per query head.

    q, out: [T, H * 64] bf16; kv_cache: [blocks, K, block size, 128] bf16 of any strides but 1 in the last, K at 0, V at
    64; sinks: [H] bf16; block_table: [R, *] int32; seq_lens: [R] int32, keys of a request, this step's included;
    query_start: [R + 1] int32. scale: of the logits; window: keys a token sees, itself included, 0 for all.
    Tokens past query_start[R] are padding: their output is 0.
    """
    tokens, kv_heads = q.shape[0], kv_cache.shape[1]
    tuned = tuned or plan(tokens, kv_heads, window)
    args = Args(**described(q, kv_cache, sinks, block_table, seq_lens, query_start, out, scale))
    kernel(q.device.index or 0, tuned)(tokens * kv_heads * tuned.splits, tuned.warps * 32, [args])
