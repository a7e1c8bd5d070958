"""Host side of `cuda/step.cu`: all layers of a decode step of one token in one launch on each rank, sm_90.

The plan is a pure function of the shape, so it is tested without a GPU; docs/kernels/ has the design and the numbers,
`engine/choose/measured.py` lists the measured GPUs.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gptoss.engine.kernels import cache, nvrtc
from vllm_gptoss.engine.kernels.attention import GROUP, HEAD
from vllm_gptoss.engine.kernels.dense import BLOCK, SHARED_LIMIT, multiprocessors
from vllm_gptoss.engine.kernels.layer import CacheScales, Group, Layer, LayerTensors, Requests

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).parent / "cuda" / "step.cu"

MAX_GROUPS = 4
"""Sets of block tables and lengths that the layers of one step may use: `groups` of step.cu's Args."""
WARPS = 15
THREADS = 32 * (WARPS + 1)
MAX_HIDDEN = 4 * BLOCK * WARPS
"""A warp keeps its columns of a staged row in registers, four blocks at most."""
MULTIPROCESSORS = 132
"""Of the GPUs it was measured on."""
ACTIVE = 4
FLUSH, BUFFERS = 3, 4
"""Units of experts between two sums over the warps, and buffers of such sums: of step.cu."""
MIN_BLOCK = 16
"""Tokens of a cache block at least: attention reads 16 keys at a time, out of one block."""
SCRATCH = (8 * 8 * 68 + 128) * 4
"""Bytes that attention takes of the staged row and the sums: eight warps' heads of 64 sums, maxima and totals."""
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
    element: str = cache.BF16
    """Of the caches of all layers."""
    ranks: int = 1
    """Tensor-parallel ranks. query_heads and intermediate are a rank's share, padding included."""


def unsupported(shape: Shape, sms: int = MULTIPROCESSORS) -> str | None:
    """Why this shape has no kernel on a GPU of `sms` multiprocessors, or None."""
    if not shape.layers or not shape.hidden or not shape.query_heads:
        return "there is no layer"
    if shape.hidden % (BLOCK * WARPS):
        return f"hidden size {shape.hidden} does not divide among {WARPS} warps of {BLOCK} columns"
    if shape.intermediate % BLOCK or shape.intermediate > shape.hidden:
        return f"intermediate size {shape.intermediate} is no multiple of {BLOCK} up to the hidden size {shape.hidden}"
    if shape.experts not in (32, 64, 128):
        return f"{shape.experts} experts, not 32, 64 or 128"
    if shape.query_heads % GROUP:
        return f"{shape.query_heads} query heads are not a multiple of {GROUP}"
    if (shape.query_heads + 2 * shape.query_heads // GROUP) * 8 < sms:  # a unit of q, k and v for each
        return f"{shape.query_heads} query heads are too few for {sms} multiprocessors"
    if shape.ranks > 1 and shape.layers % 2:
        return f"{shape.layers} layers: several ranks take an even number"
    if shape.hidden > MAX_HIDDEN or shape.query_heads > GROUP * min(sms, 64):
        return f"hidden size {shape.hidden} with {shape.query_heads} query heads is too large"
    made = plan(shape, sms)
    if made.staged + made.sums < SCRATCH:
        return f"hidden size {shape.hidden} leaves attention {made.staged + made.sums} bytes of scratch, not {SCRATCH}"
    # `out` waits for eight chunks of two rows before it gives one back, and a wrap leaves one empty; up reads one unit
    # of 16 rows while the next arrives
    blocks = shape.hidden // BLOCK
    least = max(9 * 2 * (2 * shape.query_heads * HEAD + 16), 2 * blocks * (4 * 128 + 64))
    if made.ring < least:
        return f"{shape.layers} layers leave a ring of {made.ring} bytes of shared memory, it takes {least}"
    return None


@dataclass(frozen=True, slots=True)
class StepPlan:
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
        part = 4 if shape.ranks == 1 else 2
        late = 2 * shape.hidden + ACTIVE * (2 * shape.intermediate + part * shape.hidden)
        return 256 + 2 * (logits + early + late)

    @property
    def received_bytes(self) -> int:
        """Size of `Received` of step.cu; 0 for one rank."""
        return 2 * self.shape.ranks * self.shape.hidden * (4 + 2 * ACTIVE) if self.shape.ranks > 1 else 0

    @property
    def macros(self) -> dict[str, int | str]:
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
            "CACHE": self.shape.element,
            "RANKS": self.shape.ranks,
        }


@functools.cache
def plan(shape: Shape, sms: int) -> StepPlan:
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
    return StepPlan(shape, sms, ring, sums, staged, max(1, sms // kv_heads))


class StepArgs(ctypes.Structure):
    """`struct Args` of step.cu, field for field."""

    _fields_ = [
        ("layers", ctypes.c_void_p),
        ("groups", Group * MAX_GROUPS),
        *((name, ctypes.c_void_p) for name in ("x", "residual", "out", "hidden", "attn", "zeros")),
        *((name, ctypes.c_void_p) for name in ("positions", "cos_sin", "trace")),
        *((name, ctypes.c_int) for name in ("layer_count", "group_count", "cos_sin_bf16")),
        ("two_23", ctypes.c_uint),
        *((name, ctypes.c_float) for name in ("eps", "scale", "alpha", "limit")),
        *((name, ctypes.c_void_p) for name in ("scales", "received")),
        ("peers", ctypes.c_ulonglong * 7),
        *((name, ctypes.c_int) for name in ("rank", "unused")),
    ]


@functools.cache
def _kernel(device: int, plan: StepPlan, trace: int = 0) -> nvrtc.Kernel:
    macros = plan.macros | ({"TRACE": trace} if trace else {})
    return nvrtc.load(device, SOURCE, "sm_90", macros).kernel("decode_step", plan.shared_bytes)


def compile_for(shape: Shape, device: int) -> None:
    """Compiles and loads the kernel, and checks that all its blocks can be resident.

    Raises:
        NvrtcError: the compiler or the driver refused.
    """
    made = plan(shape, multiprocessors(device))
    if not _kernel(device, made).blocks_per_multiprocessor(THREADS, made.shared_bytes):
        raise nvrtc.NvrtcError(f"decode_step with {made.shared_bytes} bytes of shared memory fits no multiprocessor")


class Step:
    """The layers of a model in order, or a rank's share of them. element: of their caches. Before a rank's first call
    `rank` is its number and `received` has the addresses of all ranks' `Received`, as it maps them."""

    rank = 0
    received: Sequence[int] = (0,)

    def __init__(
        self, layers: Sequence[LayerTensors], *, eps: float, element: str = cache.BF16, ranks: int = 1
    ) -> None:
        first = layers[0]
        assert first.experts is not None
        self.layers, self.eps, self.cos_sin = list(layers), eps, first.cos_sin
        self.alpha, self.limit = first.experts.alpha, first.experts.limit
        self.device = self.cos_sin.device.index or 0
        up, down = first.experts.up, first.experts.down
        self.shape = Shape(
            len(layers),
            first.norm.shape[0],
            first.out_weight.shape[1] // HEAD,
            down.tiles * BLOCK,
            up.experts,
            (up.scales.shape[2] // 64, down.scales.shape[2] // 64),
            element,
            ranks,
        )
        self._tables: dict[tuple[int, ...], Tensor] = {}

    @property
    def plan(self) -> StepPlan:
        """Equal on all ranks, or they cannot run together."""
        return plan(self.shape, multiprocessors(self.device))

    def compile(self) -> None:
        """Compiles and loads the kernel; otherwise the first launch does."""
        compile_for(self.shape, self.device)

    def table(self, groups: Sequence[int], caches: Sequence[cache.PagedCache]) -> Tensor | None:
        """The layers' records on the GPU, then the scales of caches that have any, for each layer's group of requests
        and its paged cache as it is now.

        None while a graph is captured and these were not seen before: nothing can be copied then.
        """
        import torch

        described = [cache.described(each) | cache.scales(each) for each in caches]
        key = (*groups, *(number for fields in described for number in fields.values()))
        if key not in self._tables:
            if torch.cuda.is_current_stream_capturing():
                return None
            of_layers = zip(self.layers, groups, caches, strict=True)
            records = b"".join(bytes(layer.record(group, kv_cache)) for layer, group, kv_cache in of_layers)
            records += b"".join(bytes(CacheScales(**found)) for found in map(cache.scales, caches) if found)
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

        shape, made = self.shape, self.plan
        peers = [self.received[(self.rank + step) % shape.ranks] for step in range(1, shape.ranks)]
        zeros = torch.zeros(made.zero_bytes, dtype=torch.uint8, device=x.device)
        out, hidden = torch.empty_like(x), torch.empty_like(x)
        pieces = shape.query_heads // GROUP * made.splits
        attn = torch.empty((pieces, 8, 66), dtype=torch.float32, device=x.device)
        args = StepArgs(
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
            scales=table.data_ptr() + ctypes.sizeof(Layer) * shape.layers,
            received=self.received[self.rank],
            peers=(ctypes.c_ulonglong * 7)(*peers),
            rank=self.rank,
        )
        kernel = _kernel(self.device, made, 0 if trace is None else trace.shape[1])
        kernel(made.grid, THREADS, [args])
        return out, hidden
