"""MXFP4 experts for few tokens on sm90: two launches from router logits (or top-k ids) to the combined output.

`experts.cu` holds the kernels and their comments, docs/kernels/ the design and its numbers. The weights are read as
triton_kernels' Hopper layouts store them, so vLLM's own `matmul_ogs` runs the larger batches on the same bytes.
Compiled for sm_90; `choose/families.py` says where it was measured.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gptoss.kernels import nvrtc

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NARROW_TOKENS, WIDE_TOKENS, MAX_TOKENS = 32, 64, 256
"""Up to how many tokens kernels are compiled for: narrow ones (slots of 8 tokens), wide ones (slots of 16), sparse ones
(the same, pairs sorted: many experts with few tokens each)."""
MAX_EXPERTS = 128
SLOT_TOKENS = 8
PARTIAL_TOKENS = 512
"""Tokens that partial sums are kept for beyond `WIDE_TOKENS`: what `experts_many.py` takes, with the same buffer."""
WIDE_ROWS, SPARSE_ROWS = 24, 22
"""Activation rows that a block of a wide kernel stages at once: any slot's 16, or about three experts' at 64 tokens."""
SHARED_LIMIT = 232_448
"""Dynamic shared memory a block may have on sm90, in bytes."""

SOURCE = Path(__file__).parent / "cuda" / "experts.cu"
ONLY = {"experts_up": 1, "experts_down": 2}
"""The macro that leaves one kernel of the source."""


@dataclass(frozen=True)
class Tuning:
    """Compile-time choices of one kernel; see the head of experts.cu.

    registers: a cap for each thread, so that both kernels' blocks fit on a multiprocessor together.
    """

    warps: int
    share: int
    tiles: int
    depth: int
    chunk: int
    registers: int = 255
    hint: str = ".L2::128B"


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


def compiled_for(tokens: int) -> int:
    """The most tokens of the kernel that runs `tokens`."""
    return next(most for most in (NARROW_TOKENS, WIDE_TOKENS, MAX_TOKENS) if tokens <= most)


def shared_bytes(
    tuning: Tuning, tiles: int, rows: int, active: int = 4, wide_experts: int = 0, most: int = WIDE_TOKENS
) -> int:
    """Dynamic shared memory of one block, mirroring the layout at the head of experts.cu.

    tiles: C/64; rows: activation rows staged, see `staged_rows`; wide_experts: local experts of a wide kernel, else 0;
    most: tokens that such a kernel is compiled for.
    """
    pairs = active * (most if wide_experts else NARROW_TOKENS)
    slots = (wide_experts + pairs // 16) * (34 if pairs > 256 else 18) if wide_experts else pairs * 10
    sorting = 128 if wide_experts and most > WIDE_TOKENS else 1
    meta = -(-(-(-(8 * pairs + slots + 20 + 32 * tuning.warps + sorting) // 4) * 4) // 128) * 128
    reduction = tuning.warps * 1024 * tuning.tiles if tuning.share > 1 else 0
    ring = tuning.warps * tuning.depth * tuning.tiles * (512 + 2 * 32)
    return meta + reduction + ring + rows * (tiles * 128 + 16)


def fitted(tuning: Tuning, tiles: int) -> Tuning:
    """`tuning` with a ring no longer than a warp's share of K: a tensor-parallel rank's down projection is short."""
    share = -(-tiles // tuning.share)
    if tuning.depth <= share:
        return tuning
    chunk = min(tuning.chunk, share)
    return replace(tuning, depth=share // chunk * chunk, chunk=chunk)


def staged_rows(which: str, tokens: int) -> tuple[int, int]:
    """(rows staged in shared memory, the kernel's `rows`).

    `rows`: how many are kept apart for each slot, 0 for every token once, used by all slots; of a wide kernel all.
    """
    if tokens > NARROW_TOKENS:
        rows = WIDE_ROWS if tokens <= WIDE_TOKENS else SPARSE_ROWS
        return rows, rows
    if which == "experts_up" and tokens <= SLOT_TOKENS:
        return tokens, 0
    each = min(tokens, SLOT_TOKENS)
    return 2 * each, each


def defines(
    tuning: Tuning,
    rows: int,
    tiles: int,
    scale_pairs: int,
    experts: int,
    active: int,
    routed: int,
    mode: tuple[int, int],
    mapped: bool,
    tokens: int = NARROW_TOKENS,
) -> dict[str, int | str]:
    """The macros that make experts.cu one kernel."""
    return {
        "TOKENS": tokens,
        "KT": tiles,
        "NROWS": rows,
        "SKT": scale_pairs,
        "EXPERTS": experts,
        "ACTIVE": active,
        "ROUTED": routed,
        "NWARPS": tuning.warps,
        "WPU": tuning.share,
        "R": tuning.tiles,
        "DEPTH": tuning.depth,
        "CHUNK": tuning.chunk,
        "MINBLOCKS": 1,
        "LOGITS": mode[0],
        "ID64": mode[1],
        "MAPPED": int(mapped),
        "CP_HINT": f'"{tuning.hint}"',
    }


UP = Tuning(warps=16, share=1, tiles=1, depth=9, chunk=3, registers=72)
DOWN = Tuning(warps=16, share=1, tiles=1, depth=9, chunk=3, registers=64)
UP_WIDE, DOWN_WIDE = replace(UP, registers=128), replace(DOWN, registers=128)
DOWN_FEWEST = Tuning(warps=12, share=2, tiles=1, depth=8, chunk=2, registers=80)
"""For up to `FEWEST_TOKENS`: a block has so few units that two warps share one."""
FEWEST_TOKENS = 2

TWO_23 = ctypes.c_uint32(1 << 23)
"""`two_23` of experts.cu."""

MAX_SCALE = 192
"""Largest e8m0 code that the kernel's arithmetic holds, a factor of 2^65."""


def unsupported(hidden: int, intermediate: int, experts: int, active: int) -> str | None:
    """Why a rank with these experts has no kernel, or None. intermediate, experts: this rank's, padding included."""
    if hidden % 64 or intermediate % 64 or not hidden or not intermediate:
        return f"experts of {hidden} x {intermediate} are not multiples of 64"
    if not 1 <= experts <= MAX_EXPERTS:
        return f"{experts} experts on one rank, not 1 to {MAX_EXPERTS}"
    if not 1 <= active <= 4:
        return f"{active} experts a token, not 1 to 4"
    for tuning, which, columns, tokens in (
        (UP, "experts_up", hidden, NARROW_TOKENS),
        (DOWN, "experts_down", intermediate, NARROW_TOKENS),
        (DOWN_FEWEST, "experts_down", intermediate, FEWEST_TOKENS),
        (UP_WIDE, "experts_up", hidden, WIDE_TOKENS),
        (DOWN_WIDE, "experts_down", intermediate, WIDE_TOKENS),
        (UP_WIDE, "experts_up", hidden, MAX_TOKENS),
        (DOWN_WIDE, "experts_down", intermediate, MAX_TOKENS),
    ):
        wide = experts if tokens > NARROW_TOKENS else 0
        rows, _ = staged_rows(which, tokens)
        needs = shared_bytes(fitted(tuning, columns // 64), columns // 64, rows, active, wide, tokens)
        if needs > SHARED_LIMIT:
            return f"{which} of {columns} columns needs {needs} bytes of shared memory, there are {SHARED_LIMIT}"
    return None


@dataclass(frozen=True)
class Recipe:
    """What one kernel is compiled from. shared: dynamic shared memory it is allowed, in bytes."""

    device: int
    name: str
    shared: int
    registers: int
    options: tuple[tuple[str, int | str], ...]


@functools.cache
def _kernel(recipe: Recipe) -> nvrtc.Kernel:
    import torch

    macros = {**dict(recipe.options), "ONLY": ONLY[recipe.name]}
    with torch.cuda.device(recipe.device):
        module = nvrtc.load(nvrtc.source(SOURCE), "sm_90", macros, [f"--maxrregcount={recipe.registers}"])
        return module.kernel(recipe.name, recipe.shared)


@functools.cache
def multiprocessors(device: int) -> int:
    """How many blocks of a whole multiprocessor run at once."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


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


@functools.cache
def partial_sums(device: int, width: int, tokens: int) -> Tensor:
    """Partial sums of `experts_down`, [tokens, width] of 32 bits, all ones: see EMPTY in combine.cuh.

    One per device and `partial_tokens`: launches of different layers follow one another on a stream, and each leaves
    it as it was. Two streams must not run these kernels at the same time.
    """
    import torch

    return torch.full((tokens, width), -1, dtype=torch.int32, device=f"cuda:{device}")


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
        kernels have no such bound; on a GPU with fewer multiprocessors nobody has measured them.
        """
        few = min(NARROW_TOKENS, multiprocessors(self.device) // self.active)
        return MAX_TOKENS if few == NARROW_TOKENS else few

    def _tuned(self, which: str, tokens: int) -> tuple[Projection, Tuning]:
        if tokens > NARROW_TOKENS:
            up, down = UP_WIDE, DOWN_WIDE
        else:
            up, down = self.tuning or (UP, DOWN_FEWEST if tokens <= FEWEST_TOKENS else DOWN)
        projection, tuning = (self.up, up) if which == "experts_up" else (self.down, down)
        return projection, fitted(tuning, projection.tiles)

    def _recipe(self, which: str, routing: torch.dtype, tokens: int) -> Recipe:
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
        return Recipe(self.device, which, min(shared, SHARED_LIMIT), tuning.registers, tuple(sorted(options.items())))

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

    def loads(self, routing: torch.dtype, most: int) -> Iterator[tuple[Callable[[Recipe], nvrtc.Kernel], Recipe]]:
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
        import torch

        staged, rows = staged_rows(run.which, tokens)
        pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
        run.kernel(
            run.grid,
            run.tuning.warps * 32,
            torch.cuda.current_stream(self.device).cuda_stream,
            [*pointers, ctypes.c_int(tokens), ctypes.c_int(rows), TWO_23, *numbers],
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
