"""Host side of `cuda/attention_many.cu`: attention with sinks for a decode step, sm_80 and later.

docs/kernels/ has the design and the numbers.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gptoss.engine.kernels import attention, cache, nvrtc
from vllm_gptoss.engine.kernels.attention import HEAD, MAX_TOKENS, arrived, parts
from vllm_gptoss.engine.kernels.dense import multiprocessors

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).parent / "cuda" / "attention_many.cu"
MAX_WINDOW = 128
"""Keys of the largest window: a token's are then never split."""
CHUNK_BYTES = {cache.BF16: 16 * 2 * HEAD * 2, cache.E4M3: 16 * 2 * HEAD}
"""Keys and values of 16 tokens, one head: a place of a warp's ring."""
OTHER_BYTES = 1024 + 256
"""Shared memory of a block that the driver takes, and its other variables."""


@dataclass(frozen=True, slots=True)
class ManyPlan:
    """Compile-time macros of one launch, and how small a share of the keys may be.

    warps: of a block; depth: chunks of a warp's ring; blocks: that a multiprocessor is to hold; window: keys a token
    sees, itself included, 0: all; least: keys of a share at least; element: of the cache; arch: compiled for.
    """

    warps: int
    depth: int
    blocks: int
    window: int
    least: int = 512
    element: str = cache.BF16
    arch: str = "sm_90"

    @property
    def macros(self) -> dict[str, int | str]:
        values = {"WARPS": self.warps, "DEPTH": self.depth, "BLOCKS": self.blocks, "WINDOW": self.window}
        return values | {"CACHE": self.element}

    @property
    def shared_bytes(self) -> int:
        """Of a block: its warps' rings."""
        size: int = self.warps * self.depth * CHUNK_BYTES[self.element]
        return size

    def slots(self, sms: int, kv_heads: int) -> int:
        """Blocks that `sms` multiprocessors hold at once, as many for each head."""
        return sms * self.blocks // kv_heads * kv_heads


def unsupported(query_heads: int, kv_heads: int, head: int, window: int) -> str | None:
    """Why this shape has no kernel, or None. window: keys a token sees, 0: all."""
    if window > MAX_WINDOW:
        return f"a window of {window} keys, more than {MAX_WINDOW}"
    why: str | None = attention.unsupported(query_heads, kv_heads, head, attention.LEAST_BLOCK)
    return why


def unreadable(q: Tensor, kv_cache: Tensor, out: Tensor) -> str | None:
    """Why these tensors of `attend` cannot be read as they lie, or None. q, out: [T, H, 64]."""
    import torch

    if any(tensor.dtype != torch.bfloat16 for tensor in (q, kv_cache, out)):
        return f"queries, cache and output are {q.dtype}, {kv_cache.dtype} and {out.dtype}, not bfloat16"
    if q.stride()[1:] != (HEAD, 1) or out.stride()[1:] != (HEAD, 1) or out.stride(0) % 2 or q.stride(0) % 2:
        return f"a token's queries lie {q.stride()} apart, its outputs {out.stride()}"
    block = kv_cache.shape[2]
    if kv_cache.stride(3) != 1 or any(step % 8 for step in kv_cache.stride()[:3]) or kv_cache.shape[3] != 2 * HEAD:
        return f"the KV cache has shape {list(kv_cache.shape)} and strides {kv_cache.stride()}"
    if block & (block - 1) or block < attention.LEAST_BLOCK:
        return f"cache blocks of {block} tokens, not a power of two from {attention.LEAST_BLOCK} on"
    return None


@functools.cache
def plan(tokens: int, window: int, element: str = cache.BF16, arch: str = "sm_90") -> ManyPlan:
    """How a layer of this window is worked on. More and smaller blocks hide that a window is soon read.

    A ring has as many bytes for each element type: it is as long as memory's latency times its bandwidth. A
    multiprocessor is to hold no more blocks than its shared memory has room for.
    """
    depth = 3 if element == cache.BF16 else 6
    warps, blocks = (2, 8) if window and tokens > 64 else (4, 4)
    made = ManyPlan(warps, depth, blocks, window, element=element, arch=arch)
    fit = (nvrtc.shared_limit(arch) + 1024) // (made.shared_bytes + OTHER_BYTES)
    return replace(made, blocks=min(blocks, fit))


class AttentionManyArgs(ctypes.Structure):
    """`struct Args` of attention_many.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "kv", "out", "sinks", "block_table", "seq_lens", "query_start")),
        *((name, ctypes.c_void_p) for name in ("parts", "arrived")),
        *((name, ctypes.c_longlong) for name in ("kv_block", "kv_head", "kv_token")),
        *((name, ctypes.c_int) for name in ("tokens", "kv_heads", "requests", "table_stride", "block_shift")),
        *((name, ctypes.c_int) for name in ("q_stride", "out_stride", "slots", "least", "padded")),
        ("scale", ctypes.c_float),
        *cache.SCALE_FIELDS,
    ]


@functools.cache
def kernel(device: int, plan: ManyPlan) -> nvrtc.Kernel:
    """The kernel of a plan, compiled and loaded.

    Raises:
        NvrtcError: the compiler or the driver refused.
    """
    return nvrtc.load(device, SOURCE, plan.arch, plan.macros).kernel("attention_many", plan.shared_bytes)


def load(device: int, kv_heads: int, window: int, element: str = cache.BF16, arch: str = "sm_90") -> None:
    """Compiles and allocates all that `attend` needs, so that a captured graph finds it there.

    Raises:
        NvrtcError: the compiler or the driver refused.
    """
    for tuned in dict.fromkeys(plan(tokens, window, element, arch) for tokens in range(1, MAX_TOKENS + 1)):
        kernel(device, tuned)
        parts(device, tuned.slots(multiprocessors(device), kv_heads))
    arrived(device, kv_heads)


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
    tuned: ManyPlan | None = None,
    padded: int = 0,
) -> None:
    """Causal attention of every token over the cached keys of its request: arguments as `attention.attend`.

    The launch is a dependent one on sm_90 alone: earlier GPUs have none, and on later ones it was never tried. Tokens
    past query_start[R] are padding: their output is 0. padded: `out` is `product_many.tiled` of so many tokens.

    Raises:
        ValueError: more than MAX_TOKENS tokens.
    """
    device, tokens, kv_heads = q.device.index or 0, q.shape[0], kv_cache.shape[1]
    if tokens > MAX_TOKENS:
        raise ValueError(f"{tokens} tokens, more than {MAX_TOKENS}")
    tuned = tuned or plan(tokens, window, cache.element(kv_cache))
    slots = tuned.slots(multiprocessors(device), kv_heads)
    args = AttentionManyArgs(
        **attention.described(q, kv_cache, sinks, block_table, seq_lens, query_start, out, scale),
        parts=parts(device, slots).data_ptr(),
        arrived=arrived(device, kv_heads).data_ptr(),
        tokens=tokens,
        slots=slots,
        least=tuned.least,
        padded=padded,
    )
    grid = tokens * kv_heads + (0 if window else slots)
    kernel(device, tuned)(grid, tuned.warps * 32, [args], dependent=tuned.arch == "sm_90")
