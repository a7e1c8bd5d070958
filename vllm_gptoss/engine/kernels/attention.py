"""Host side of `cuda/attention_few.cu`: attention with sinks for a step of few tokens, sm_90.

docs/kernels/ has the design and the numbers, `engine/choose/measured.py` lists the measured GPUs.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gptoss.engine.kernels import cache, nvrtc, scratch

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).parent / "cuda" / "attention_few.cu"
GROUP = 8
"""Query heads per key/value head."""
HEAD = 64
LEAST_KEYS = 2048
"""Keys of a share at least: merging pieces costs as much as a few chunks of each warp."""
LEAST_BLOCK = 16
"""Tokens of the smallest cache block that vLLM makes for FlashAttention."""
MAX_SPLITS = 8
"""Blocks of one cluster at most (the portable limit)."""
RESIDENT = 256
"""Blocks that are resident at once, two a multiprocessor, with room for clusters that fit nowhere."""
MAX_TOKENS = 512
"""Rows of the counters; a step of more tokens is not for these kernels."""
PART = GROUP * HEAD + 2 * GROUP
"""Floats that a piece of a split token leaves."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Compile-time macros of one launch, and how small a share of the keys may be.

    splits: blocks of a cluster; window: keys a token sees, itself included, 0: all; shares: clusters that share the
    keys of one head at most, 1: no token is cut; element: of the cache.
    """

    splits: int
    warps: int
    window: int
    shares: int = 1
    element: str = cache.BF16

    @property
    def macros(self) -> dict[str, int | str]:
        return {"SPLITS": self.splits, "WARPS": self.warps, "WINDOW": self.window, "CACHE": self.element}


def unsupported(query_heads: int, kv_heads: int, head: int, block_size: int) -> str | None:
    """Why this shape has no kernel, or None. block_size: tokens per block of the paged cache."""
    if head != HEAD:
        return f"head size {head}, not {HEAD}"
    if query_heads != GROUP * kv_heads or not kv_heads:
        return f"{query_heads} query heads for {kv_heads} key/value heads, not {GROUP} each"
    if block_size & (block_size - 1) or block_size < LEAST_BLOCK:
        return f"cache blocks of {block_size} tokens, not a power of two from {LEAST_BLOCK} on"
    return None


@functools.cache
def plan(tokens: int, kv_heads: int, window: int, element: str = cache.BF16) -> AttentionPlan:
    """How the keys are shared out: enough blocks to cover the multiprocessors, not so many that they queue.

    A window of at most 128 keys is one chunk of 16 for each of 8 warps, so it is never split. Blocks for further pieces
    end at once in a step of short contexts, so there are few where they queue behind the others and `out` starts later:
    3 us a full layer with 16 tokens of 2,000 keys and 112 such blocks (H100).
    """
    if 0 < window <= 128:
        return AttentionPlan(1, 8, window, element=element)
    splits = MAX_SPLITS
    while splits > 2 and splits * tokens * kv_heads > 128:
        splits //= 2
    if window:
        return AttentionPlan(splits, 8, window, element=element)
    shared = min(192, max(64, RESIDENT - splits * tokens * kv_heads))
    return AttentionPlan(splits, 8, window, max(1, shared // splits // kv_heads), element)


class AttentionArgs(ctypes.Structure):
    """`struct Args` of attention_few.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "kv", "out", "sinks", "block_table", "seq_lens", "query_start")),
        *((name, ctypes.c_void_p) for name in ("parts", "arrived")),
        *((name, ctypes.c_longlong) for name in ("kv_block", "kv_head", "kv_token")),
        *((name, ctypes.c_int) for name in ("tokens", "kv_heads", "requests", "table_stride", "block_shift")),
        *((name, ctypes.c_int) for name in ("q_stride", "out_stride", "shares", "least")),
        ("scale", ctypes.c_float),
        *cache.SCALE_FIELDS,
    ]


@functools.cache
def kernel(device: int, plan: AttentionPlan) -> nvrtc.Kernel:
    """The kernel of a plan, compiled and loaded.

    Raises:
        NvrtcError: the compiler or the driver refused.
    """
    return nvrtc.load(device, SOURCE, "sm_90", plan.macros).kernel("attention_few", 0)


@functools.cache
def parts(device: int, slots: int) -> Tensor:
    """[2 * slots, PART] f32: sums of the pieces of split tokens. One for all layers and steps of a stream."""
    import torch

    return torch.empty(2 * slots, PART, device=f"cuda:{device}", dtype=torch.float32)


@scratch.keep
def arrived(device: int, kv_heads: int) -> Tensor:
    """[MAX_TOKENS * K] int32: how much of each token and head has arrived, zero between launches."""
    import torch

    return torch.zeros(MAX_TOKENS * kv_heads, device=f"cuda:{device}", dtype=torch.int32)


def allocate(device: int, kv_heads: int) -> None:
    """Allocates all that `attend` of at most 16 tokens needs, so that a captured graph finds it there."""
    arrived(device, kv_heads)
    for shares in {plan(tokens, kv_heads, 0).shares for tokens in range(1, 17)}:
        parts(device, shares * kv_heads)


def described(
    q: Tensor,
    kv_cache: cache.PagedCache,
    sinks: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    out: Tensor,
    scale: float,
) -> dict[str, int | float]:
    """The fields of both kernels' structures for the tensors of `attend`."""
    return {
        "q": q.data_ptr(),
        **cache.described(kv_cache),
        **cache.scales(kv_cache),
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
    kv_cache: cache.PagedCache,
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

    q, out: [T, H * 64] bf16; kv_cache: [blocks, K, block size, 128] of any strides but 1 in the last, K at 0, V at 64;
    sinks: [H] bf16; block_table: [R, *] int32; seq_lens: [R] int32, keys of a request, this step's included;
    query_start: [R + 1] int32. scale: of the logits; window: keys a token sees, itself included, 0 for all.
    Tokens past query_start[R] are padding: their output is 0.
    """
    tokens, kv_heads = q.shape[0], kv_cache.shape[1]
    device = q.device.index or 0
    tuned = tuned or plan(tokens, kv_heads, window, cache.element(kv_cache))
    args = AttentionArgs(
        **described(q, kv_cache, sinks, block_table, seq_lens, query_start, out, scale),
        parts=parts(device, tuned.shares * kv_heads).data_ptr(),
        arrived=arrived(device, kv_heads).data_ptr(),
        tokens=tokens,
        shares=tuned.shares,
        least=LEAST_KEYS,
    )
    clusters = (tokens + tuned.shares - 1) * kv_heads
    kernel(device, tuned)(clusters * tuned.splits, tuned.warps * 32, [args])
