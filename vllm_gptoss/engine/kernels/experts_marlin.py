"""MXFP4 experts for up to 64 tokens over the weights of vLLM's Marlin experts: two launches from top-k ids, from sm80.

`experts_marlin.cu` holds the kernels, `engine/experts/marlin.py` the layout. Padding that vLLM stores is not read.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gptoss.engine.kernels import experts_plan, nvrtc
from vllm_gptoss.engine.kernels.experts import ONLY, TWO_23, partial_sums, partial_tokens, pointer, routing_mode
from vllm_gptoss.engine.kernels.experts_plan import NARROW_TOKENS, WIDE_TOKENS, Tuning

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SOURCE = Path(__file__).parent / "cuda" / "experts_marlin.cu"
STEP_BYTES = 1024 + 64
"""Of a warp's ring: values and scales of 64 rows x 32 columns."""
TILINGS = (Tuning(15, 15, 4, 3, 1), Tuning(12, 12, 4, 2, 1), Tuning(8, 8, 4, 3, 1))
"""From the best to the one with the least shared memory. 15 warps have 6 of the 90 steps of 2,880 columns each."""


@dataclass(frozen=True)
class MarlinPlan:
    """One kernel for `most` tokens. slot: tokens of a wide one's slots; rows: staged by a block; each: its `rows`."""

    which: str
    tiling: Tuning
    most: int
    slot: int
    rows: int
    each: int
    shared: int


@functools.cache
def plan_for(
    which: str, tokens: int, columns: int, experts: int, active: int, limit: int, blocks: int,
    tilings: tuple[Tuning, ...] = TILINGS,
) -> MarlinPlan:  # fmt: skip
    """The first kernel with a block of at most `limit` bytes of shared memory. columns: without padding.

    Raises:
        ValueError: none does.
    """
    row = columns * 2 + 16
    # a block of a narrow kernel stages two slots
    first = [(NARROW_TOKENS, 16)] * (tokens <= NARROW_TOKENS and tokens * active <= blocks)
    for (most, slot), tiling in itertools.product([*first, (WIDE_TOKENS, 16), (WIDE_TOKENS, 8)], tilings):
        narrow = most == NARROW_TOKENS
        wide_experts = 0 if narrow else experts
        fixed = experts_plan.shared_bytes(Tuning(tiling.warps, 1, 0, 0, 0), 0, 0, active, wide_experts, most, slot)
        fixed += tiling.warps * (tiling.depth * STEP_BYTES + 2048) + 128
        rows, each = experts_plan.staged_rows(which, tokens)
        if not narrow:
            rows = each = min(experts_plan.WIDE_ROWS, (limit - fixed) // row)
        if fixed + rows * row <= limit and (narrow or rows >= slot):
            return MarlinPlan(which, tiling, most, slot, rows, each, fixed + rows * row)
    raise ValueError(f"{which} of {columns} columns and {tokens} tokens needs more than {limit} bytes of shared memory")


def unsupported(hidden: int, intermediate: int, experts: int, active: int, limit: int) -> str | None:
    """Why a rank with these experts has no kernel, or None. limit: as `nvrtc.shared_limit`."""
    if hidden % 64 or intermediate % 64 or not hidden or not intermediate:
        return f"experts of {hidden} x {intermediate} are not multiples of 64"
    if not 1 <= experts <= experts_plan.MAX_EXPERTS or not 1 <= active <= 4:
        return f"{experts} experts on one rank and {active} of a token, not up to {experts_plan.MAX_EXPERTS} and 4"
    try:
        for which, columns in (("experts_up", hidden), ("experts_down", intermediate)):
            plan_for(which, WIDE_TOKENS, columns, experts, active, limit, 0)
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class MarlinProjection:
    """One projection as vLLM's Marlin experts store it.

    values: [E, C/16, N*2] i32; scales: [E, C/32, N] e8m0; bias: [E, N] bf16, N and C with padding; rows, columns: those
    to read, multiples of 64. Scale codes at most 192, as in `Projection`.
    """

    values: Tensor
    scales: Tensor
    bias: Tensor
    rows: int
    columns: int

    def check(self) -> None:
        """Raises ValueError where a shape, dtype or stride is not what the kernel was compiled for."""
        import torch

        experts, tiles, width = self.values.shape
        stored, columns = width // 2, tiles * 16
        tensors = (self.values, self.scales, self.bias)
        shapes = [list(tensor.shape) for tensor in tensors[1:]]
        dtypes = (self.values.dtype, self.scales.element_size(), self.bias.dtype)
        whole = all(tensor.is_contiguous() for tensor in tensors) and not (self.rows % 64 or self.columns % 64)
        if shapes != [[experts, columns // 32, stored], [experts, stored]] or not whole or stored % 64:
            raise ValueError(f"weights [{experts}, {tiles}, {width}], scales and bias {shapes} are no Marlin experts")
        if dtypes != (torch.int32, 1, torch.bfloat16) or self.rows > stored or self.columns > columns:
            raise ValueError(f"{self.rows} x {self.columns} of {stored} x {columns}, {dtypes}")


@functools.cache
def _kernel(device: int, arch: str, which: str, shared: int, macros: tuple[tuple[str, int | str], ...]) -> nvrtc.Kernel:
    return nvrtc.load(device, SOURCE, arch, dict(macros)).kernel(which, shared)


class MarlinFewExperts:
    """Both projections of one layer's local experts, ready to launch for up to 64 tokens.

    shared: bytes of shared memory that a block may have; blocks: of a launch, at most one on each multiprocessor.
    """

    max_tokens = WIDE_TOKENS

    def __init__(
        self, up: MarlinProjection, down: MarlinProjection, active: int, *, alpha: float, limit: float,
        expert_map: Tensor | None, arch: str, shared: int, blocks: int, tilings: tuple[Tuning, ...] = TILINGS,
    ) -> None:  # fmt: skip
        up.check()
        down.check()
        if down.columns * 2 != up.rows or up.columns != down.rows or len(up.values) != len(down.values):
            raise ValueError(f"up {up.rows}x{up.columns} and down {down.rows}x{down.columns} do not chain")
        if why := unsupported(up.columns, down.columns, len(up.values), active, shared):
            raise ValueError(why)
        self.projections = {"experts_up": up, "experts_down": down}
        self.active, self.alpha, self.limit, self.expert_map = active, alpha, limit, expert_map
        self.arch, self.shared, self.blocks, self.tilings = arch, shared, blocks, tilings
        self.device = up.values.device.index or 0

    def plan(self, which: str, tokens: int) -> MarlinPlan:
        sizes = (self.projections[which].columns, len(self.projections[which].values), self.active)
        return plan_for(which, tokens, *sizes, self.shared, self.blocks, self.tilings)

    def macros(self, plan: MarlinPlan, routing: torch.dtype) -> dict[str, int | str]:
        projection = self.projections[plan.which]
        experts, tiles, width = projection.values.shape
        down, tiling = plan.which == "experts_down", plan.tiling
        stored = self.projections["experts_up"].values.shape[1] * 16
        return {
            "TOKENS": plan.most, "WIDE_SLOT": plan.slot, "KT": projection.columns // 64, "NROWS": projection.rows,
            "NPAD": width // 2, "KPAD": tiles * 16, "XPAD": projection.columns if down else stored, "OPAD": stored,
            "EXPERTS": experts, "ACTIVE": self.active, "ROUTED": experts, "NWARPS": tiling.warps, "WPU": tiling.share,
            "DEPTH": tiling.depth, "MINBLOCKS": 1, "LOGITS": 0,
            "ID64": routing_mode(routing)[1], "MAPPED": int(self.expert_map is not None), "ONLY": ONLY[plan.which],
        }  # fmt: skip

    def kernel(self, plan: MarlinPlan, routing: torch.dtype) -> nvrtc.Kernel:
        macros = tuple(sorted(self.macros(plan, routing).items()))
        return _kernel(self.device, self.arch, plan.which, self.shared, macros)

    def compile(self, routing: torch.dtype, tokens: tuple[int, ...] = tuple(range(1, WIDE_TOKENS + 1))) -> None:
        """Compiles and loads the kernels, and allocates the buffer of partial sums."""
        plans = {self.plan(which, each) for which in ONLY for each in tokens}
        kernels = {tuple(sorted(self.macros(plan, routing).items())): plan for plan in plans}
        nvrtc.at_once((self.kernel, plan, routing) for plan in kernels.values())
        partial_sums(self.device, self.active * self.projections["experts_down"].rows, partial_tokens(1))

    def _launch(self, which: str, tensors: tuple[Tensor | None, ...], ids: Tensor, *numbers: float) -> None:
        plan, projection = self.plan(which, len(ids)), self.projections[which]
        weights = (projection.values, projection.scales, projection.bias)
        arguments = [*map(pointer, (*weights, *tensors)), ctypes.c_int(len(ids)), ctypes.c_int(plan.each), TWO_23]
        arguments += map(ctypes.c_float, numbers)
        self.kernel(plan, ids.dtype)(self.blocks, plan.tiling.warps * 32, arguments, plan.shared, dependent=False)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        """Runs both projections on the current stream.

        x, out: [T, hidden with padding] bf16, T <= max_tokens, padding of `out` becomes zero; ids: [T, A] int32 or
        int64 (global ids with an expert map, -1 skips) with weights [T, A] f32.
        """
        import torch

        down = self.projections["experts_down"]
        act = torch.empty((ids.numel(), down.columns), dtype=torch.bfloat16, device=x.device)
        self._launch("experts_up", (x, ids, None, self.expert_map, act), ids, self.alpha, self.limit)
        parts = partial_sums(self.device, self.active * down.rows, partial_tokens(1))
        self._launch("experts_down", (act, ids, weights, self.expert_map, parts, out), ids)
