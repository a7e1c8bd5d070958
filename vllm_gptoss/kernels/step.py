"""Host side of `cuda/step.cu`: all layers of a decode step of one token in one launch, sm_90.

Measured on: H200. Compiled for: sm_90. The plan is a pure function of the shape, so it is tested without a GPU;
docs/kernels.md has the design and the numbers.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gptoss.kernels import nvrtc
from vllm_gptoss.kernels.attention import GROUP, HEAD
from vllm_gptoss.kernels.dense import BLOCK, SHARED_LIMIT, multiprocessors

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gptoss.kernels.experts import Projection

SOURCE = Path(__file__).parent / "cuda" / "step.cu"

MAX_GROUPS = 4
"""Sets of block tables and lengths that the layers of one step may use: `groups` of step.cu's Args."""
WARPS = 15
THREADS = 32 * (WARPS + 1)
ACTIVE = 4
FLUSH, BUFFERS = 3, 4
"""Units of experts between two sums over the warps, and buffers of such sums: of step.cu."""
STATIC = 576
"""Bytes of `Shared` of step.cu that no shape changes, and its padding."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernel is compiled for. hidden C, query heads H, intermediate I, experts E of the whole model."""

    layers: int
    hidden: int
    query_heads: int
    intermediate: int
    experts: int
    scale_pairs: tuple[int, int]
    """Column pairs of 32 in the stored scales of the up and the down projection."""


def unsupported(shape: Shape) -> str | None:
    """Why this shape has no kernel, or None."""
    if shape.hidden % (BLOCK * WARPS):
        return f"hidden size {shape.hidden} does not divide among {WARPS} warps of {BLOCK} columns"
    if shape.intermediate != shape.hidden:
        return f"intermediate size {shape.intermediate} is not the hidden size {shape.hidden}"
    if shape.experts not in (32, 64, 128):
        return f"{shape.experts} experts, not 32, 64 or 128"
    if shape.query_heads % GROUP:
        return f"{shape.query_heads} query heads are not a multiple of {GROUP}"
    return None


@dataclass(frozen=True, slots=True)
class Plan:
    """Compile-time macros and launch geometry. ring, sums, staged: bytes of dynamic shared memory."""

    shape: Shape
    grid: int
    ring: int
    sums: int
    staged: int
    splits: int

    @property
    def shared_bytes(self) -> int:
        return self.ring + self.staged + self.sums

    @property
    def zero_bytes(self) -> int:
        """Size of `Zeros` of step.cu."""
        shape, kv_heads = self.shape, self.shape.query_heads // GROUP
        logits = 8 * (4 if shape.experts <= 32 else 1) * (shape.experts + 4)
        early = 2 * 2 * HEAD * (shape.query_heads + kv_heads)
        late = 2 * shape.hidden + ACTIVE * (2 * shape.intermediate + 4 * shape.hidden)
        return 256 + 2 * (logits + early + late)

    @property
    def macros(self) -> dict[str, int]:
        return {
            "LAYERS": self.shape.layers,
            "GRID": self.grid,
            "RING": self.ring,
            "HB": self.shape.hidden // BLOCK,
            "QB": self.shape.query_heads,
            "IB": self.shape.intermediate // BLOCK,
            "EXPERTS": self.shape.experts,
            "ACTIVE": ACTIVE,
            "SKU": self.shape.scale_pairs[0],
            "SKD": self.shape.scale_pairs[1],
            "SPLITS": self.splits,
        }


@functools.cache
def plan(shape: Shape, sms: int) -> Plan:
    """The launch on a GPU of `sms` multiprocessors: the ring takes what the rest of shared memory leaves."""
    kv_heads = shape.query_heads // GROUP
    units = -(-(shape.query_heads + 2 * kv_heads) * 8 // sms)
    pairs = -(-shape.hidden // 2 // sms)
    staged = 2 * shape.hidden
    rows = max(units * 8, -(-2 * pairs // 16) * 16)
    sums = (BUFFERS * FLUSH * WARPS * 16 + rows * WARPS + 4 * pairs) * 4
    static = STATIC + units * 128 + 8 * pairs + ctypes.sizeof(Layer) * shape.layers
    static = -(-static // 128) * 128  # the dynamic part begins at a multiple of 128
    ring = (SHARED_LIMIT - static - staged - sums) // 128 * 128
    return Plan(shape, sms, ring, sums, staged, max(1, sms // kv_heads))


class Layer(ctypes.Structure):
    """`struct Layer` of step.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("norm", "w_qkv", "b_qkv", "w_out", "b_out", "post_norm")),
        *((name, ctypes.c_void_p) for name in ("w_router", "b_router", "up_values", "up_scales", "up_bias")),
        *((name, ctypes.c_void_p) for name in ("down_values", "down_scales", "down_bias", "sinks", "kv")),
        *((name, ctypes.c_longlong) for name in ("kv_block", "kv_head", "kv_token")),
        *((name, ctypes.c_int) for name in ("window", "group", "block_shift", "unused")),
    ]


class Group(ctypes.Structure):
    """`struct Group` of step.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("block_table", "seq_lens", "query_start", "slots")),
        *((name, ctypes.c_longlong) for name in ("table_stride", "requests")),
    ]


class Args(ctypes.Structure):
    """`struct Args` of step.cu, field for field."""

    _fields_ = [
        ("layers", ctypes.c_void_p),
        ("groups", Group * MAX_GROUPS),
        *((name, ctypes.c_void_p) for name in ("x", "residual", "out", "hidden", "attn", "zeros")),
        *((name, ctypes.c_void_p) for name in ("positions", "cos_sin", "trace")),
        *((name, ctypes.c_int) for name in ("layer_count", "group_count", "cos_sin_bf16")),
        ("two_23", ctypes.c_uint),
        *((name, ctypes.c_float) for name in ("eps", "scale", "alpha", "limit")),
    ]


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer on one rank that holds all of it.

    norm, post_norm: [C] bf16; qkv_weight: [(H + 2K) * 64, C] bf16; out_weight: [C, H * 64] bf16; router_weight: [E, C]
    bf16, each with its bias; up, down: the experts; sinks: [H] bf16; window: keys a token sees, itself included, 0 for
    all.
    """

    norm: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    post_norm: Tensor
    router_weight: Tensor
    router_bias: Tensor
    up: Projection
    down: Projection
    sinks: Tensor
    window: int

    def record(self, group: int, cache: Tensor) -> Layer:
        """What the kernel reads of it. cache: [blocks, K, block size, 128] bf16, K at 0, V at 64."""
        return Layer(
            norm=self.norm.data_ptr(),
            w_qkv=self.qkv_weight.data_ptr(),
            b_qkv=self.qkv_bias.data_ptr(),
            w_out=self.out_weight.data_ptr(),
            b_out=self.out_bias.data_ptr(),
            post_norm=self.post_norm.data_ptr(),
            w_router=self.router_weight.data_ptr(),
            b_router=self.router_bias.data_ptr(),
            up_values=self.up.values.data_ptr(),
            up_scales=self.up.scales.data_ptr(),
            up_bias=self.up.bias.data_ptr(),
            down_values=self.down.values.data_ptr(),
            down_scales=self.down.scales.data_ptr(),
            down_bias=self.down.bias.data_ptr(),
            sinks=self.sinks.data_ptr(),
            kv=cache.data_ptr(),
            kv_block=cache.stride(0),
            kv_head=cache.stride(1),
            kv_token=cache.stride(2),
            window=self.window,
            group=group,
            block_shift=cache.shape[2].bit_length() - 1,
        )


@dataclass(frozen=True, slots=True)
class Requests:
    """What one group of layers reads of the step: block_table [R, *] int32, seq_lens [R] int32, query_start [R + 1]
    int32, slots [>= 1] int64 (negative: not written). The token is the only one of the first request that has any."""

    block_table: Tensor
    seq_lens: Tensor
    query_start: Tensor
    slots: Tensor

    def record(self) -> Group:
        """What the kernel reads of it."""
        return Group(
            block_table=self.block_table.data_ptr(),
            seq_lens=self.seq_lens.data_ptr(),
            query_start=self.query_start.data_ptr(),
            slots=self.slots.data_ptr(),
            table_stride=self.block_table.stride(0),
            requests=self.seq_lens.shape[0],
        )


@functools.cache
def _kernel(device: int, plan: Plan, trace: int = 0) -> nvrtc.Kernel:
    import torch

    macros = plan.macros | ({"TRACE": trace} if trace else {})
    with torch.cuda.device(device):
        return nvrtc.load(nvrtc.source(SOURCE), "sm_90", macros).kernel("decode_step", plan.shared_bytes)


def compile_for(shape: Shape, device: int) -> None:
    """Compiles and loads the kernel, and checks that all its blocks can be resident.

    Raises:
        NvrtcError: the compiler or the driver refused.
    """
    made = plan(shape, multiprocessors(device))
    if not _kernel(device, made).blocks_per_multiprocessor(THREADS, made.shared_bytes):
        raise nvrtc.NvrtcError(f"decode_step with {made.shared_bytes} bytes of shared memory fits no multiprocessor")


class Step:
    """The layers of a model in order, ready to launch."""

    def __init__(
        self, layers: Sequence[LayerTensors], cos_sin: Tensor, *, eps: float, alpha: float, limit: float
    ) -> None:
        first = layers[0]
        self.layers, self.cos_sin = list(layers), cos_sin
        self.eps, self.alpha, self.limit = eps, alpha, limit
        self.device = cos_sin.device.index or 0
        self.shape = Shape(
            len(layers),
            first.norm.shape[0],
            first.out_weight.shape[1] // HEAD,
            first.down.tiles * BLOCK,
            first.up.experts,
            (first.up.scales.shape[2] // 64, first.down.scales.shape[2] // 64),
        )
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def compile(self) -> None:
        """Compiles and loads the kernel; otherwise the first launch does."""
        compile_for(self.shape, self.device)

    def table(self, groups: Sequence[int], caches: Sequence[Tensor]) -> Tensor | None:
        """The layers' records on the GPU, for each layer's group of requests and its paged cache as it is now.

        None while a graph is captured and these were not seen before: nothing can be copied then.
        """
        import torch

        key = (*groups, *(number for cache in caches for number in (cache.data_ptr(), *cache.stride())))
        if key not in self._tables:
            if torch.cuda.is_current_stream_capturing():
                return None
            each = zip(self.layers, groups, caches, strict=True)
            records = b"".join(bytes(layer.record(group, cache)) for layer, group, cache in each)
            self._tables[key] = torch.frombuffer(bytearray(records), dtype=torch.uint8).to(f"cuda:{self.device}")
        return self._tables[key]

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        requests: Sequence[Requests],
        table: Tensor,
        trace: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(the last layer's experts, what they are to be added to), both [1, C] bf16.

        x, residual: [1, C] bf16, added up first; positions: [1] int64; requests: what `table`'s groups number;
        trace: [layers, 14, multiprocessors] int64 for clock marks.
        """
        import torch

        shape, sms = self.shape, multiprocessors(self.device)
        made = plan(shape, sms)
        zeros = torch.zeros(made.zero_bytes, dtype=torch.uint8, device=x.device)
        out, hidden = torch.empty_like(x), torch.empty_like(x)
        pieces = shape.query_heads // GROUP * made.splits
        attn = torch.empty((pieces, 8, 66), dtype=torch.float32, device=x.device)
        args = Args(
            layers=table.data_ptr(),
            groups=(Group * MAX_GROUPS)(*(each.record() for each in requests)),
            x=x.data_ptr(),
            residual=None if residual is None else residual.data_ptr(),
            out=out.data_ptr(),
            hidden=hidden.data_ptr(),
            attn=attn.data_ptr(),
            zeros=zeros.data_ptr(),
            positions=positions.data_ptr(),
            cos_sin=self.cos_sin.data_ptr(),
            trace=None if trace is None else trace.data_ptr(),
            layer_count=shape.layers,
            group_count=len(requests),
            cos_sin_bf16=int(self.cos_sin.dtype == torch.bfloat16),
            two_23=1 << 23,
            eps=self.eps,
            scale=HEAD**-0.5 * math.log2(math.e),
            alpha=self.alpha,
            limit=self.limit,
        )
        kernel = _kernel(self.device, made, 0 if trace is None else trace.shape[1])
        kernel(sms, THREADS, torch.cuda.current_stream(x.device).cuda_stream, [args])
        return out, hidden
