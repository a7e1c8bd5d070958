"""Host side of `cuda/dense_few.cu`: projections of a step of at most 16 tokens, sm_90.

The plan (warps, stages, units per block) is a pure function of the shape, so it is tested without a GPU.
docs/kernels/ has the design and the numbers, `engine/choose/measured.py` lists the measured GPUs.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gptoss.engine.kernels import cache, nvrtc

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).parent / "cuda" / "dense_few.cu"

MAX_TOKENS = 16
UNIT = 8
"""Weight rows of one unit of work, the N side of mma.m16n8k16."""
BLOCK = 64
"""Columns that one warp multiplies at a time; 2880 = 45 * 64."""
SHARED_LIMIT = 227 * 1024
FEWEST_MULTIPROCESSORS = 78
"""Of the smallest sm_90 part: there a block has the most units."""
HEAD = 64


class Mode(enum.IntEnum):
    """Which epilogue the projection ends in."""

    QKV = 0
    OUT = 1
    ROUTER = 2


@dataclass(frozen=True, slots=True)
class DensePlan:
    """Compile-time macros and launch geometry of one projection. element: of the cache that QKV writes."""

    mode: Mode
    columns: int
    rows: int
    token_groups: int
    part: int
    warps: int
    stages: int
    units: int
    grid: int
    min_ctas: int
    top_k: int = 0
    element: str = cache.BF16

    @property
    def block(self) -> int:
        return 32 * (self.warps + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the ring, reused for the partial sums of all warps."""
        ring = self.stages * UNIT * (self.part * 128 + 16)
        return max(ring, self.warps * self.units * self.token_groups * 8 * UNIT * 4)

    @property
    def macros(self) -> dict[str, int | str]:
        values: dict[str, int | str] = {
            "MODE": int(self.mode),
            "NT": self.token_groups,
            "BLOCKS": self.columns // BLOCK,
            "PART": self.part,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "UNITS": self.units,
            "MIN_CTAS": self.min_ctas,
        }
        if self.mode is Mode.ROUTER:
            values |= {"EXPERTS": self.rows, "TOPK": self.top_k, "CLUSTER": self.grid}
        if self.mode is Mode.QKV:
            values["CACHE"] = self.element
        return values


@functools.cache
def multiprocessors(device: int) -> int:
    """Streaming multiprocessors of a CUDA device."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def unsupported(mode: Mode, rows: int, columns: int, top_k: int = 0) -> str | None:
    """Why this shape has no plan, or None. rows = weight rows N, columns = C; top_k: of the router."""
    if rows <= 0 or columns <= 0:
        return f"{rows} rows of {columns} columns are no projection"
    if columns % BLOCK:
        return f"{columns} columns are not a multiple of {BLOCK}"
    if rows % UNIT or (mode is Mode.QKV and rows % HEAD):
        return f"{rows} rows do not divide into units"
    if mode is Mode.ROUTER and rows % 32:
        return f"{rows} experts are not a multiple of 32"
    if _warps(columns // BLOCK) is None:
        return f"{columns} columns do not divide among 8 to 16 warps"
    if mode is Mode.ROUTER and top_k > min(rows, 32):
        return f"{top_k} of {rows} experts a token, more than 32 or all"
    for tokens in (8, MAX_TOKENS):
        needs = _plan(mode, rows, columns, tokens, FEWEST_MULTIPROCESSORS, top_k).shared_bytes
        if needs > SHARED_LIMIT:
            return f"{rows} rows of {columns} columns need {needs} bytes of shared memory, there are {SHARED_LIMIT}"
    return None


def _warps(blocks: int) -> int | None:
    return next((w for w in (16, 15, 14, 13, 12, 11, 10, 9, 8) if blocks % w == 0), None)


@functools.cache
def plan(
    mode: Mode, rows: int, columns: int, tokens: int, sms: int, top_k: int = 0, element: str = cache.BF16
) -> DensePlan:
    """The launch of one projection with weight [rows, columns] for `tokens` tokens on a GPU of `sms` multiprocessors.

    Raises:
        ValueError: more than 16 tokens, or a shape without a plan.
    """
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"1 to {MAX_TOKENS} tokens, got {tokens}")
    if reason := unsupported(mode, rows, columns, top_k):
        raise ValueError(reason)
    return replace(_plan(mode, rows, columns, tokens, sms, top_k), element=element)


def _plan(mode: Mode, rows: int, columns: int, tokens: int, sms: int, top_k: int) -> DensePlan:
    blocks = columns // BLOCK
    warps = _warps(blocks)
    assert warps is not None
    token_groups = 1 if tokens <= 8 else 2
    part = blocks
    while part > 32 and part % 2 == 0 and (part // 2) % warps == 0:
        part //= 2
    total = rows // UNIT
    grid = min(total, 4 if rows <= 32 else 8) if mode is Mode.ROUTER else min(total, sms)
    units = -(-total // grid)
    # out with few tokens: a block's whole share fits in shared memory together with the attention kernel, and is
    # loaded while that kernel runs
    room = 200 * 1024 if mode is Mode.OUT and token_groups == 1 else 140 * 1024
    stages = max(1, min(units * (blocks // part), room // (UNIT * (part * 128 + 16))))
    # qkv's ring leaves no room for a second block anyway, so it may have all registers
    min_ctas = 2 if token_groups == 1 and mode is not Mode.QKV else 1
    return DensePlan(mode, columns, rows, token_groups, part, warps, stages, units, grid, min_ctas, top_k)


class DenseArgs(ctypes.Structure):
    """`struct Args` of dense_few.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "r", "r_out", "norm", "w", "bias", "out")),
        *((name, ctypes.c_void_p) for name in ("positions", "cos_sin", "slots", "kv")),
        *((name, ctypes.c_longlong) for name in ("kv_block", "kv_head", "kv_token")),
        *((name, ctypes.c_void_p) for name in ("topk_weights", "topk_ids", "logits")),
        *((name, ctypes.c_int) for name in ("tokens", "units", "q_rows", "kv_rows", "block_shift", "cos_sin_bf16")),
        ("eps", ctypes.c_float),
        ("out_stride", ctypes.c_int),
        *cache.SCALE_FIELDS,
    ]


@functools.cache
def kernel(device: int, plan: DensePlan) -> nvrtc.Kernel:
    """The kernel of a plan, compiled and loaded.

    Raises:
        NvrtcError: the compiler or the driver refused.
    """
    return nvrtc.load(device, SOURCE, "sm_90", plan.macros).kernel("dense_few", plan.shared_bytes)


def _launch(plan: DensePlan, args: DenseArgs, x: Tensor) -> None:
    kernel(x.device.index or 0, plan)(plan.grid, plan.block, [args])


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor lies, as a field of a kernel's arguments takes it."""
    return None if tensor is None else tensor.data_ptr()


ROPE_FIELDS = [
    *((name, ctypes.c_void_p) for name in ("positions", "cos_sin", "slots", "kv")),
    *((name, ctypes.c_longlong) for name in ("kv_block", "kv_head", "kv_token")),
    *((name, ctypes.c_int) for name in ("q_heads", "kv_heads", "block_shift", "cos_sin_bf16")),
]
"""The fields of a kernel's arguments for RoPE and the cache write after a product."""


def rope_described(
    rows: int, positions: Tensor, cos_sin: Tensor, slots: Tensor, kv_cache: cache.PagedCache
) -> dict[str, int | None]:
    """`ROPE_FIELDS` and the cache's scales by field, of a product of so many rows."""
    kv_heads = kv_cache.shape[1]
    heads = {"q_heads": rows // HEAD - 2 * kv_heads, "kv_heads": kv_heads}
    return heads | _rotation_described(positions, cos_sin, slots, kv_cache)


def _rotation_described(
    positions: Tensor, cos_sin: Tensor, slots: Tensor, kv_cache: cache.PagedCache
) -> dict[str, int | None]:
    """The fields of a kernel's arguments for RoPE and the cache write, except their heads."""
    import torch

    return {
        "positions": address(positions),
        "cos_sin": address(cos_sin),
        "slots": address(slots),
        **cache.described(kv_cache),
        **cache.scales(kv_cache),
        "cos_sin_bf16": int(cos_sin.dtype == torch.bfloat16),
    }


def router_described(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    weight: Tensor,
    bias: Tensor,
    normed: Tensor,
    weights: Tensor,
    ids: Tensor,
    eps: float,
    residual_out: Tensor | None,
    logits: Tensor | None,
) -> dict[str, int | float | None]:
    """The fields of both router kernels' structures for the arguments of `router`."""
    return {
        "x": address(x),
        "r": address(residual),
        "r_out": address(residual_out),
        "norm": address(norm),
        "w": address(weight),
        "bias": address(bias),
        "out": address(normed),
        "topk_weights": address(weights),
        "topk_ids": address(ids),
        "logits": address(logits),
        "tokens": x.shape[0],
        "eps": eps,
    }


def qkv_rope(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    weight: Tensor,
    bias: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    kv_cache: cache.PagedCache,
    q: Tensor,
    residual_out: Tensor | None,
    eps: float,
    tuned: DensePlan | None = None,
) -> None:
    """q = RoPE(norm(x + residual) Wq^T + b); k (rotated) and v of the same go into the paged cache.

    x, residual, residual_out: [T, C] bf16, T <= 16, residual_out = x + residual; norm: [C] bf16;
    weight: [(H + 2K) * 64, C] bf16, row-major, q then k then v; bias: [(H + 2K) * 64] bf16;
    positions, slots: [T] int64, slot < 0 is not written; cos_sin: [positions, 64] f32 or bf16, 32 cosines, 32 sines;
    kv_cache: [blocks, K, block size, 128] of any strides but 1 in the last, K at 0, V at 64; q: [T, H * 64] bf16.
    """
    tokens, rows = x.shape[0], weight.shape[0]
    kv_rows = kv_cache.shape[1] * HEAD
    sms, element = multiprocessors(x.device.index or 0), cache.element(kv_cache)
    tuned = tuned or plan(Mode.QKV, rows, x.shape[1], tokens, sms, element=element)
    args = DenseArgs(
        x=address(x),
        r=address(residual),
        r_out=address(residual_out),
        norm=address(norm),
        w=address(weight),
        bias=address(bias),
        out=address(q),
        **_rotation_described(positions, cos_sin, slots, kv_cache),
        tokens=tokens,
        units=rows // UNIT,
        q_rows=rows - 2 * kv_rows,
        kv_rows=kv_rows,
        eps=eps,
        out_stride=q.stride(0),
    )
    _launch(tuned, args, x)


def out_proj(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    tuned: DensePlan | None = None,
) -> None:
    """out = x W^T + bias + residual.

    x: [T, C] bf16, T <= 16; weight: [N, C] bf16, row-major; bias: [N] bf16; residual, out: [T, N] bf16.
    """
    tokens, rows = x.shape[0], weight.shape[0]
    tuned = tuned or plan(Mode.OUT, rows, x.shape[1], tokens, multiprocessors(x.device.index or 0))
    args = DenseArgs(
        x=address(x),
        r=address(residual),
        w=address(weight),
        bias=address(bias),
        out=address(out),
        tokens=tokens,
        units=rows // UNIT,
        out_stride=out.stride(0),
    )
    _launch(tuned, args, x)


def router(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    weight: Tensor,
    bias: Tensor,
    normed: Tensor,
    weights: Tensor,
    ids: Tensor,
    eps: float,
    residual_out: Tensor | None = None,
    logits: Tensor | None = None,
    tuned: DensePlan | None = None,
) -> None:
    """normed = norm(x + residual); logits = normed W^T + b; ids, weights = top-A of the logits, softmax over those.

    x, residual, residual_out, normed: [T, C] bf16, T <= 16; norm: [C] bf16; weight: [E, C] bf16; bias: [E] bf16;
    weights: [T, A] f32; ids: [T, A] int32, falling in logit, a tie goes to the lower id; logits: [T, E] f32.
    """
    tokens, rows = x.shape[0], weight.shape[0]
    tuned = tuned or plan(Mode.ROUTER, rows, x.shape[1], tokens, multiprocessors(x.device.index or 0), ids.shape[1])
    args = DenseArgs(
        **router_described(x, residual, norm, weight, bias, normed, weights, ids, eps, residual_out, logits),
        units=rows // UNIT,
        out_stride=normed.stride(0),
    )
    _launch(tuned, args, x)
