"""MXFP4 experts for few tokens on sm90: two launches from router logits (or top-k ids) to the combined output.

`experts.cu` holds the kernels, `experts_plan.py` their compile-time parameters, docs/kernels/ the design and the
measurements. The weights are read as triton_kernels' Hopper layouts store them, so vLLM's own `matmul_ogs` runs the
larger batches on the same bytes.
Compiled for sm_90. `engine/choose/families.py` lists the GPUs on which it was measured.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gptoss.engine.kernels import nvrtc, scratch
from vllm_gptoss.engine.kernels.dense import multiprocessors
from vllm_gptoss.engine.kernels.experts_plan import (
    DOWN,
    DOWN_FEWEST,
    DOWN_WIDE,
    FEWEST_TOKENS,
    MAX_EXPERTS,
    MAX_TOKENS,
    NARROW_TOKENS,
    PARTIAL_TOKENS,
    SHARED_LIMIT,
    UP,
    UP_WIDE,
    WIDE_MULTIPROCESSORS,
    WIDE_TOKENS,
    Tuning,
    compiled_for,
    defines,
    fitted,
    shared_bytes,
    staged_rows,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SOURCE = Path(__file__).parent / "cuda" / "experts.cu"
ONLY = {"experts_up": 1, "experts_down": 2}
"""The macro that leaves one kernel of the source."""


@dataclass(frozen=True)
class Projection:
    """One projection's weights in the Hopper layouts.

    values: [E, N/4, C/64*128] u8; scales: [E, ceil(N/256)*8, G/2*64] u8, G >= C/32 even; bias: [E, N] f32.
    N a multiple of 16, C of 64. Scale bytes at most 192 (a factor of 2^65): see `scale` in experts.cu.
    """

    values: Tensor
    scales: Tensor
    bias: Tensor

    @property
    def experts(self) -> int:
        return self.values.shape[0]

    @property
    def rows(self) -> int:
        return self.values.shape[1] * 4

    @property
    def tiles(self) -> int:
        return self.values.shape[2] // 128

    def check(self) -> None:
        """Raises ValueError where a shape or stride is not what the kernel was compiled for."""
        import torch

        experts, quads, width = self.values.shape
        if width % 128 or quads % 4 or experts > MAX_EXPERTS:
            raise ValueError(f"values [{experts}, {quads}, {width}]: at most 128 experts, rows of 16, columns of 64")
        if self.scales.shape[:2] != (experts, -(-self.rows // 256) * 8) or self.scales.shape[2] < self.tiles * 64:
            raise ValueError(
                f"scales {list(self.scales.shape)} do not fit {self.rows} rows x {self.tiles * 64} columns"
            )
        if self.bias.shape != (experts, self.rows) or self.bias.dtype != torch.float32:
            raise ValueError(f"bias {list(self.bias.shape)} {self.bias.dtype}, wanted [{experts}, {self.rows}] float32")
        for tensor in (self.values, self.scales, self.bias):
            if not tensor.is_contiguous():
                raise ValueError("weights must be contiguous")


def routing_mode(dtype: torch.dtype) -> tuple[int, int]:
    """(LOGITS, ID64) of the kernel for a routing dtype: int32 or int64 ids, bfloat16 or float32 logits."""
    import torch

    modes = {torch.int32: (0, 0), torch.int64: (0, 1), torch.bfloat16: (1, 0), torch.float32: (2, 0)}
    if dtype not in modes:
        raise ValueError(f"routing must be int32 or int64 ids, or bfloat16 or float32 logits, not {dtype}")
    return modes[dtype]


TWO_23 = ctypes.c_uint32(1 << 23)
"""`two_23` of experts.cu."""


@dataclass(frozen=True)
class CompileJob:
    """What one kernel is compiled from. shared: dynamic shared memory it is allowed, in bytes."""

    device: int
    name: str
    shared: int
    registers: int
    options: tuple[tuple[str, int | str], ...]


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """A kernel's argument: where the tensor lies, null without one."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@functools.cache
def _kernel(recipe: CompileJob) -> nvrtc.Kernel:
    macros = {**dict(recipe.options), "ONLY": ONLY[recipe.name]}
    module = nvrtc.load(recipe.device, SOURCE, "sm_90", macros, [f"--maxrregcount={recipe.registers}"])
    return module.kernel(recipe.name, recipe.shared)


@dataclass(frozen=True)
class _Launch:
    which: str
    kernel: nvrtc.Kernel
    tuning: Tuning
    grid: int
    projection: Projection


def partial_tokens(tokens: int) -> int:
    """Rows of the partial sums that a step of `tokens` uses: 3 MB, or 24 where more than 64 tokens run here."""
    return WIDE_TOKENS if tokens <= WIDE_TOKENS else PARTIAL_TOKENS


def empty_sums(device: int, width: int, tokens: int) -> Tensor:
    """A buffer without partial sums, [tokens, width] of 32 bits, all ones: see EMPTY in combine.cuh.

    A word is one in float32 or, in `experts_many.py`, two in bf16.
    """
    import torch

    return torch.full((tokens, width), -1, dtype=torch.int32, device=f"cuda:{device}")


@scratch.keep
def partial_sums(device: int, width: int, tokens: int) -> Tensor:
    """The `empty_sums` of `experts_down`, reused between launches.

    One per device and `partial_tokens`: launches of different layers run in order on a stream, and each restores the
    buffer. Two streams must not run these kernels at the same time.
    """
    return empty_sums(device, width, tokens)


class FewTokenExperts:
    """Both projections of one layer's local experts, ready to launch.

    up: N = 2I interleaved gate and up rows, C = hidden; down: N = hidden, C = I.
    """

    def __init__(
        self,
        up: Projection,
        down: Projection,
        active: int,
        routed: int,
        *,
        alpha: float,
        limit: float,
        expert_map: Tensor | None = None,
        tuning: tuple[Tuning, Tuning] | None = None,
    ) -> None:
        up.check()
        down.check()
        if down.tiles * 64 * 2 != up.rows or up.tiles * 64 != down.rows or up.experts != down.experts:
            raise ValueError(f"up {up.rows}x{up.tiles * 64} and down {down.rows}x{down.tiles * 64} do not chain")
        self.up, self.down, self.active, self.routed = up, down, active, routed
        self.alpha, self.limit, self.expert_map, self.tuning = alpha, limit, expert_map, tuning
        self.device = up.values.device.index or 0
        self._launches: dict[tuple[str, tuple[int, int], bool, int], _Launch] = {}

    @functools.cached_property
    def max_tokens(self) -> int:
        """Tokens of a step at most.

        A block stages the activations of two slots, so slots (at most T * active) must not outnumber blocks. The wide
        kernels have no such bound.
        """
        blocks = multiprocessors(self.device)
        return MAX_TOKENS if blocks >= WIDE_MULTIPROCESSORS else min(NARROW_TOKENS, blocks // self.active)

    def _tuned(self, which: str, tokens: int) -> tuple[Projection, Tuning]:
        if tokens > NARROW_TOKENS:
            up, down = UP_WIDE, DOWN_WIDE
        else:
            up, down = self.tuning or (UP, DOWN_FEWEST if tokens <= FEWEST_TOKENS else DOWN)
        projection, tuning = (self.up, up) if which == "experts_up" else (self.down, down)
        return projection, fitted(tuning, projection.tiles)

    def _recipe(self, which: str, routing: torch.dtype, tokens: int) -> CompileJob:
        projection, tuning = self._tuned(which, tokens)
        most = compiled_for(tokens)
        options = defines(
            tuning,
            projection.rows,
            projection.tiles,
            projection.scales.shape[2] // 64,
            projection.experts,
            self.active,
            self.routed,
            routing_mode(routing),
            self.expert_map is not None,
            most,
        )
        shared = self._shared(tuning, projection, staged_rows(which, most)[0], most)
        return CompileJob(
            self.device, which, min(shared, SHARED_LIMIT), tuning.registers, tuple(sorted(options.items()))
        )

    def _prepare(self, which: str, routing: torch.dtype, tokens: int) -> _Launch:
        key = (which, routing_mode(routing), tokens <= FEWEST_TOKENS, compiled_for(tokens))
        if key not in self._launches:
            kernel = _kernel(self._recipe(which, routing, tokens))
            projection, tuning = self._tuned(which, tokens)
            self._launches[key] = _Launch(which, kernel, tuning, multiprocessors(self.device), projection)
        return self._launches[key]

    def _shared(self, tuning: Tuning, projection: Projection, rows: int, most: int) -> int:
        wide = projection.experts if most > NARROW_TOKENS else 0
        return shared_bytes(tuning, projection.tiles, rows, self.active, wide, most)

    def loads(
        self, routing: torch.dtype, most: int
    ) -> Iterator[tuple[Callable[[CompileJob], nvrtc.Kernel], CompileJob]]:
        """Calls, some alike, that load the kernels of 1 to `most` tokens for a routing dtype: see `nvrtc.at_once`."""
        for which in ONLY:
            for tokens in (FEWEST_TOKENS, FEWEST_TOKENS + 1, min(most, WIDE_TOKENS), most):
                yield _kernel, self._recipe(which, routing, tokens)

    def compile(self, routing: torch.dtype, most: int) -> None:
        """Compiles and loads what 1 to `most` tokens need for a routing dtype; otherwise the first launch does."""
        nvrtc.at_once(self.loads(routing, most))
        partial_sums(self.device, self.active * self.down.rows, partial_tokens(most))

    def launch_up(self, x: Tensor, routing: Tensor, act: Tensor, *, dependent: bool = True) -> None:
        """act[T * A, I] bf16 = SwiGLU of the up projection of x [T, hidden] bf16, T <= max_tokens."""
        run = self._prepare("experts_up", routing.dtype, x.shape[0])
        tensors = (self.up.values, self.up.scales, self.up.bias, x, routing, None, self.expert_map, act)
        numbers = (ctypes.c_float(self.alpha), ctypes.c_float(self.limit))
        self._launch(run, tensors, x.shape[0], numbers, dependent)

    def launch_down(
        self,
        act: Tensor,
        routing: Tensor,
        weights: Tensor | None,
        out: Tensor,
        *,
        dependent: bool = True,
    ) -> None:
        """out [T, hidden] bf16 = weighted sum of the down projections.

        With `dependent`, the kernel before on this stream must be `launch_up` with the same routing: the routing is
        read before the wait, which only `experts_up` makes safe.
        """
        run = self._prepare("experts_down", routing.dtype, out.shape[0])
        tensors = (self.down.values, self.down.scales, self.down.bias, act, routing, weights, self.expert_map)
        parts = partial_sums(self.device, self.active * self.down.rows, partial_tokens(out.shape[0]))
        self._launch(run, (*tensors, parts, out), out.shape[0], (), dependent)

    def _launch(
        self,
        run: _Launch,
        tensors: tuple[Tensor | None, ...],
        tokens: int,
        numbers: tuple[ctypes.c_float, ...],
        dependent: bool,
    ) -> None:
        staged, rows = staged_rows(run.which, tokens)
        run.kernel(
            run.grid,
            run.tuning.warps * 32,
            [*map(pointer, tensors), ctypes.c_int(tokens), ctypes.c_int(rows), TWO_23, *numbers],
            self._shared(run.tuning, run.projection, staged, compiled_for(tokens)),
            dependent=dependent,
        )

    def __call__(self, x: Tensor, routing: Tensor, weights: Tensor | None, out: Tensor) -> None:
        """Runs both projections on the current stream.

        x: [T, hidden] bf16, T <= max_tokens; routing: [T, A] int32/int64 ids (global ids with an expert map, -1 skips)
        with weights [T, A] f32, or [T, E] bf16/f32 router logits and None; out: [T, hidden] bf16.
        """
        import torch

        pairs = x.shape[0] * self.active
        act = torch.empty((pairs, self.up.rows // 2), dtype=torch.bfloat16, device=x.device)
        self.launch_up(x, routing, act)
        self.launch_down(act, routing, weights, out)


class SameLayer:
    """Other kernels over the weights and the routing of `few`, ready to launch."""

    def __init__(self, few: FewTokenExperts | SameLayer) -> None:
        self.up, self.down, self.active, self.routed = few.up, few.down, few.active, few.routed
        self.alpha, self.limit, self.expert_map, self.device = few.alpha, few.limit, few.expert_map, few.device

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """Values, scales and bias of up and of down, as a kernel takes them."""
        return self.up.values, self.up.scales, self.up.bias, self.down.values, self.down.scales, self.down.bias

    def macros(self, routing: torch.dtype) -> dict[str, int]:
        """What a kernel for both projections is compiled for, of the layer and of the routing's dtype."""
        logits, id64 = routing_mode(routing)
        return {
            "KT_UP": self.up.tiles,
            "KT_DOWN": self.down.tiles,
            "SKT_UP": self.up.scales.shape[2] // 64,
            "SKT_DOWN": self.down.scales.shape[2] // 64,
            "EXPERTS": self.up.experts,
            "ACTIVE": self.active,
            "ROUTED": self.routed,
            "LOGITS": logits,
            "ID64": id64,
            "MAPPED": int(self.expert_map is not None),
        }
