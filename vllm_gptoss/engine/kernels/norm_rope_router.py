"""Host side of the small kernels around a layer's products in a decode step of many tokens, sm_90.

`cuda/norm_many.cu`, `cuda/rope_many.cu` and `cuda/route_many.cu`; the products themselves are cuBLAS's. Plans are pure
functions of the shape, so they are tested without a GPU. docs/kernels/ has the design and the numbers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gptoss.engine.kernels import cache, nvrtc
from vllm_gptoss.engine.kernels.dense import BLOCK, HEAD, ROPE_FIELDS, address, rope_described, router_described

if TYPE_CHECKING:
    from torch import Tensor

CUDA = Path(__file__).parent / "cuda"
TILE = 16
"""Tokens of a cluster of the router, the M side of mma.m16n8k16."""
LARGEST_CLUSTER = 8
"""Blocks of a portable one."""
MOST_WARPS = 16
"""Of a block of the router: with the registers of its fragments."""


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """Compile-time macros of the router and its launch.

    warps: of a block, each of 64 columns; cluster: blocks that share the columns.
    """

    warps: int
    cluster: int
    experts: int
    top_k: int

    @property
    def macros(self) -> dict[str, int]:
        return {
            "WARPS": self.warps,
            "CLUSTER": self.cluster,
            "EXPERTS": self.experts,
            "TOPK": self.top_k,
            # 512 tokens are more clusters than there are multiprocessors for, one block each
            "MIN_CTAS": 2 if self.warps <= 9 and self.experts <= 32 else 1,
        }

    @property
    def shared_bytes(self) -> int:
        """`Shared` of route_many.cu."""
        chosen = -(-TILE // self.cluster)
        sums = self.warps * TILE * (self.experts + 8 + 1)
        return 4 * (sums + self.cluster * (chosen * self.experts + TILE))


def unsupported(hidden: int, experts: int, top_k: int) -> str | None:
    """Why a layer of this shape has no such kernels, or None."""
    if hidden % BLOCK or not 0 < hidden <= 8192:
        return f"{hidden} columns are not a multiple of {BLOCK} up to 8192"
    if _cluster(hidden // BLOCK) is None:
        return f"{hidden} columns do not divide among clusters of up to {LARGEST_CLUSTER} x {MOST_WARPS} warps"
    if experts % 32 or not 0 < experts <= 128:
        return f"{experts} experts, not 32, 64, 96 or 128"
    if not 0 < top_k <= min(experts, 32):
        return f"{top_k} of {experts} experts a token, more than 32 or all"
    return None


def _cluster(blocks: int) -> int | None:
    """Blocks of the cluster that shares `blocks` times 64 columns: the most, so that a block has little to read."""
    sizes = range(LARGEST_CLUSTER, 0, -1)
    return next((size for size in sizes if blocks % size == 0 and blocks // size <= MOST_WARPS), None)


@functools.cache
def plan(hidden: int, experts: int, top_k: int) -> RoutePlan:
    """The router's launch.

    Raises:
        ValueError: a shape without a plan.
    """
    if reason := unsupported(hidden, experts, top_k):
        raise ValueError(reason)
    cluster = _cluster(hidden // BLOCK)
    assert cluster is not None
    return RoutePlan(hidden // BLOCK // cluster, cluster, experts, top_k)


class NormArgs(ctypes.Structure):
    """`struct Args` of norm_many.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "r", "r_out", "norm", "out")),
        ("eps", ctypes.c_float),
        ("padded", ctypes.c_int),
    ]


class RopeArgs(ctypes.Structure):
    """`struct Args` of rope_many.cu, field for field."""

    _fields_ = [
        ("qkv", ctypes.c_void_p),
        *ROPE_FIELDS,
        ("stride", ctypes.c_int),
        *cache.SCALE_FIELDS,
    ]


class RouteArgs(ctypes.Structure):
    """`struct Args` of route_many.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "r", "r_out", "norm", "w", "bias", "out")),
        *((name, ctypes.c_void_p) for name in ("topk_weights", "topk_ids", "logits")),
        ("tokens", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]


@functools.cache
def norm_kernel(device: int, hidden: int) -> nvrtc.Kernel:
    """The norm's kernel, compiled and loaded.

    Raises:
        NvrtcError: the compiler or the driver refused.
    """
    return _kernel(device, "norm_many", {"COLUMNS": hidden}, 0)


@functools.cache
def rope_kernel(device: int, element: str = cache.BF16) -> nvrtc.Kernel:
    """As `norm_kernel`, for `rope` into a cache of that element type."""
    return _kernel(device, "rope_many", {"CACHE": element}, 0)


@functools.cache
def route_kernel(device: int, plan: RoutePlan) -> nvrtc.Kernel:
    """As `norm_kernel`, for `router`."""
    return _kernel(device, "route_many", plan.macros, plan.shared_bytes)


def _kernel(device: int, name: str, macros: Mapping[str, int | str], shared: int) -> nvrtc.Kernel:
    return nvrtc.load(device, CUDA / f"{name}.cu", "sm_90", macros).kernel(name, shared)


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    residual_out: Tensor | None,
    eps: float,
    padded: int = 0,
) -> None:
    """out = norm(x + residual); residual_out = x + residual.

    x, residual, out, residual_out: [T, C] bf16, row-major; weight: [C] bf16; padded: `out` is `product_many.tiled`
    of so many tokens.
    """
    tokens, hidden = x.shape
    args = NormArgs(
        x=address(x),
        r=address(residual),
        r_out=address(residual_out),
        norm=address(weight),
        out=address(out),
        eps=eps,
        padded=padded,
    )
    norm_kernel(x.device.index or 0, hidden)(tokens, -(-hidden // 256) * 32, [args])


def rope(qkv: Tensor, positions: Tensor, cos_sin: Tensor, slots: Tensor, kv_cache: cache.PagedCache) -> None:
    """Queries and keys of `qkv` are rotated, queries where they lie; keys and values go into the paged cache.

    qkv: [T, (H + 2K) * 64] bf16, queries, keys, values; positions, slots: [T] int64, slot < 0 is not written; both must
    be there before the kernel before this one starts; cos_sin: [positions, 64] f32 or bf16, 32 cosines, 32 sines;
    kv_cache: [blocks, K, block size, 128] of any strides but 1 in the last, K at 0, V at 64.
    """
    tokens, rows = qkv.shape
    args = RopeArgs(
        qkv=address(qkv),
        **rope_described(rows, positions, cos_sin, slots, kv_cache),
        stride=qkv.stride(0),
    )
    threads = min(1024, -(-rows // HEAD * 4 // 32) * 32)
    rope_kernel(qkv.device.index or 0, cache.element(kv_cache))(tokens, threads, [args])


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
) -> None:
    """normed = norm(x + residual); logits = normed W^T + b; ids, weights = top-A of the logits, softmax over those.

    Arguments as of `dense.router`, of any number of tokens.
    """
    tokens, hidden = x.shape
    tuned = plan(hidden, weight.shape[0], ids.shape[1])
    args = RouteArgs(
        **router_described(x, residual, norm, weight, bias, normed, weights, ids, eps, residual_out, logits)
    )
    grid = -(-tokens // TILE) * tuned.cluster
    route_kernel(x.device.index or 0, tuned)(grid, tuned.warps * 32, [args])
