"""MXFP4 experts for many tokens on sm90: one launch from router logits (or top-k ids) to the combined output.

`cuda/experts_many.cu` holds the kernel, docs/kernels/ the design and its numbers. The weights are the bytes that
`experts.py` and vLLM's own `matmul_ogs` read.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gptoss.engine.kernels import nvrtc, scratch
from vllm_gptoss.engine.kernels.experts import (
    CompileJob,
    FewTokenExperts,
    Projection,
    SameLayer,
    empty_sums,
    multiprocessors,
    partial_sums,
    pointer,
    routing_mode,
)
from vllm_gptoss.engine.kernels.experts_plan import MAX_EXPERTS, PARTIAL_TOKENS, SHARED_LIMIT
from vllm_gptoss.engine.kernels.tensor_map import TensorMap, tensor_map

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SOURCE = Path(__file__).parent / "cuda" / "experts_many.cu"
NAME = "experts_both"
MAX_TOKENS, MAX_PAIRS = 2048, 8192
"""What any kernel is compiled for: lists of more pairs leave no memory for two stages of activations."""
KEPT_TOKENS = 2 * PARTIAL_TOKENS
"""Most tokens of a step such that its bf16 partial sums fit into the float32 buffer of `experts.py`."""
REGISTERS = {4: 96, 3: 128}
"""A thread's registers at the start, by the number of consuming warpgroups."""

TWO_7 = ctypes.c_uint32(1 << 7)
"""`two_7` of experts_many.cu."""


@dataclass(frozen=True)
class ManyTuning:
    """groups: consuming warpgroups of a block; depth: stages of weights, of `chunk` x 64 columns for each group;
    unrolled: the loop over K is all of them, not one; columns: of products, multiples of 8: an expert's tokens are
    multiplied with the least that holds them."""

    groups: int
    depth: int
    chunk: int
    unrolled: bool
    columns: tuple[int, ...]

    @property
    def ring_bytes(self) -> int:
        """Of weights and their scales."""
        return self.groups * self.depth * self.chunk * (2048 + 128)

    @property
    def slot_bytes(self) -> int:
        """Of a stage of activations."""
        return self.chunk * max(self.columns) * 128

    @property
    def threads(self) -> int:
        """Of a block."""
        return (self.groups + 1) * 128


COLUMNS = (8, 16, 24, 32, 40, 48, 64, 72, 80, 88, 96, 112)
"""Of the products that experts_many.cu has."""
STREAMING = ManyTuning(groups=4, depth=3, chunk=5, unrolled=True, columns=(16, 24, 32, 40, 48))
NARROW = replace(STREAMING, columns=(8, 16, 24, 40))
MIDDLE = ManyTuning(groups=3, depth=3, chunk=5, unrolled=False, columns=(32, 48, 64, 80, 96))
LARGE = replace(MIDDLE, columns=(40, 64, 72, 80, 96))
WIDE = ManyTuning(groups=3, depth=3, chunk=3, unrolled=True, columns=(32, 48, 64, 80, 96, 112))
"""Four groups stream weights faster if an expert has few tokens. Three groups leave registers for more columns of
products, and stages of three tiles leave memory for 112 columns. Products of 8 columns take as many cycles as products
of 16 but less energy, which saves time where power limits the clock. Each number of columns compiles to a separate
loop, and an additional loop that never runs can cost 1 %. Six loops over a whole ring of five tiles are slower than
loops over one stage because of their code size (docs/kernels/experiments.md)."""

BY_PAIRS = {10: NARROW, 32: STREAMING, 48: MIDDLE, 64: LARGE, 96: WIDE}
"""By the pairs (a token and one of its experts) for each routed expert up to which each runs: 80, 256, 384, 512 and 768
tokens of the 20b, 320, 1,024, 1,536 and 2,048 of the 120b. At 896 tokens of the 20b `experts_prefill.py` takes as long
(docs/kernels/experiments.md)."""


def tunings_for(routed: int, active: int) -> dict[int, ManyTuning]:
    """The tunings, keyed by the most tokens that each is compiled for.

    A tuning that serves decode steps and larger steps is compiled once for each: with bookkeeping sized for 768 tokens,
    steps of 300 tokens of the 120b take 10 % longer.
    """
    limit, largest = min(MAX_TOKENS, MAX_PAIRS // active), max(BY_PAIRS)
    tunings: dict[int, ManyTuning] = {}
    for pairs, tuning in BY_PAIRS.items():
        most = pairs * routed // active
        most = min(limit, max(most, PARTIAL_TOKENS) if pairs == largest else most)
        if max(tunings, default=0) < PARTIAL_TOKENS:
            tunings.setdefault(min(most, PARTIAL_TOKENS), tuning)
        tunings.setdefault(most, tuning)
    return tunings


def meta_bytes(tuning: ManyTuning, most: int, active: int, experts: int) -> int:
    """Of `Meta` in experts_many.cu at most, rounded up."""
    pairs, chunks = most * active, experts + most * active // max(tuning.columns)
    lists = 5 * chunks + 2 * pairs + 5 * (most // 32 + 3) * active
    return -(-(16 * tuning.depth + 28 * 32 + 24 + 256 + lists + 16) // 128) * 128


def x_bytes(tuning: ManyTuning, most: int, active: int, experts: int) -> int:
    """What is left of shared memory for activations."""
    left = SHARED_LIMIT - tuning.ring_bytes - meta_bytes(tuning, most, active, experts)
    return left // 1024 * 1024


def fitted(tuning: ManyTuning, most: int, active: int, experts: int) -> ManyTuning:
    """`tuning` with the most columns that leave memory for two stages of activations: long lists of pairs take some."""
    *fewer, largest = tuning.columns
    for columns in sorted((n for n in COLUMNS if fewer[-1] < n <= largest), reverse=True):
        made = replace(tuning, columns=(*fewer, columns))
        if x_bytes(made, most, active, experts) >= 2 * made.slot_bytes:
            return made
    return tuning


def shared_bytes(tuning: ManyTuning, most: int, active: int, experts: int) -> int:
    """Dynamic shared memory of one block."""
    sizes = (tuning, most, active, experts)
    return x_bytes(*sizes) + meta_bytes(*sizes) + tuning.ring_bytes


def compile_options(registers: int) -> list[str]:
    """NVRTC options. The second compiles lambdas without `__device__` as device functions."""
    return [f"--maxrregcount={registers}", "--device-as-default-execution-space"]


@functools.cache
def _kernel(recipe: CompileJob) -> nvrtc.Kernel:
    module = nvrtc.load(recipe.device, SOURCE, "sm_90a", dict(recipe.options), compile_options(recipe.registers))
    return module.kernel(recipe.name, recipe.shared)


@scratch.keep
def counters(device: int) -> Tensor:
    """Which chunks' activations are complete, and which rounds of work are taken, all 0 between launches: as with
    `partial_sums`, two streams must not run these kernels at the same time."""
    import torch

    return torch.zeros(2 * MAX_EXPERTS, dtype=torch.int32, device=f"cuda:{device}")


def unit_maps(p: Projection, chunk: int) -> tuple[TensorMap, TensorMap]:
    """Maps of a projection's values and scales, in boxes of 64 rows by `chunk` tiles of columns.

    Of the scales a line of 64 bytes is for rows t and t + 8 of tiles of 16: a box has one half of four lines.
    """
    quads, width = p.values.shape[1:]
    values = tensor_map(p.values, (width // 8, p.experts * quads), (chunk * 16, 16), 128)
    lines = p.scales.shape[2] // 64
    scales = tensor_map(p.scales, (8, lines, p.experts * p.scales.shape[1]), (4, chunk, 4), 64)
    return values, scales


class ManyTokenExperts(SameLayer):
    """Both projections of one layer's local experts in one launch."""

    def __init__(self, few: FewTokenExperts) -> None:
        super().__init__(few)
        sizes = (few.active, few.up.experts)
        self.tunings = {most: fitted(each, most, *sizes) for most, each in tunings_for(few.routed, few.active).items()}
        self.max_tokens = max(self.tunings)
        self._launches: dict[tuple[int, tuple[int, int]], nvrtc.Kernel] = {}
        self._maps: dict[int, tuple[TensorMap, ...]] = {}

    def recipe(self, most: int, routing: torch.dtype) -> CompileJob:
        """What the kernel for up to `most` tokens, one of `tunings`, is compiled from for a routing dtype."""
        tuning = self.tunings[most]
        sizes = (tuning, most, self.active, self.up.experts)
        options = {
            **self.macros(routing),
            "TOKENS": most,
            "GROUPS": tuning.groups,
            "DEPTH": tuning.depth,
            "CHUNK": tuning.chunk,
            "UNROLLED": tuning.depth if tuning.unrolled else 1,
            "COLUMNS": sum(1 << columns // 8 for columns in tuning.columns),
            "X_BYTES": x_bytes(*sizes),
        }
        registers = REGISTERS[tuning.groups]
        return CompileJob(self.device, NAME, shared_bytes(*sizes), registers, tuple(sorted(options.items())))

    def loads(self, routing: torch.dtype, most: int) -> Iterator[tuple[Callable[..., object], Hashable]]:
        """Calls that load the kernels of 1 to `most` tokens for a routing dtype and what they keep: see
        `nvrtc.at_once`."""
        for largest, tuning in self.tunings.items():
            yield _kernel, self.recipe(largest, routing)
            yield self.maps, tuning.chunk
            if most <= largest:
                break
        yield counters, self.device

    def _prepare(self, tokens: int, routing: torch.dtype) -> tuple[nvrtc.Kernel, ManyTuning]:
        """The kernel for so many tokens, and what it is tuned to."""
        if not 0 < tokens <= self.max_tokens:
            raise ValueError(f"1 to {self.max_tokens} tokens, got {tokens}")
        most = next(most for most in self.tunings if tokens <= most)
        key = (most, routing_mode(routing))
        if key not in self._launches:
            self._launches[key] = _kernel(self.recipe(most, routing))
        return self._launches[key], self.tunings[most]

    def maps(self, chunk: int) -> tuple[TensorMap, ...]:
        """Of values and scales of up and of down, in boxes of 64 rows by `chunk` tiles."""
        if chunk not in self._maps:
            self._maps[chunk] = tuple(each for p in (self.up, self.down) for each in unit_maps(p, chunk))
        return self._maps[chunk]

    def _weights(self, chunk: int) -> tuple[ctypes.Structure | ctypes.c_void_p, ...]:
        """Values, scales and bias of up, then of down."""
        up, up_scales, down, down_scales = self.maps(chunk)
        return up, up_scales, pointer(self.up.bias), down, down_scales, pointer(self.down.bias)

    def _parts(self, tokens: int) -> Tensor:
        """An empty buffer (EMPTY of combine.cuh) for partial sums in bf16.

        Steps of up to `KEPT_TOKENS` tokens share one. Larger steps allocate it, which takes 2 to 3 % of their time: a
        shared buffer for 2,048 tokens would take 47 MB of the KV cache.
        """
        width = self.active * self.down.rows
        if tokens <= KEPT_TOKENS:
            return partial_sums(self.device, width, PARTIAL_TOKENS)
        return empty_sums(self.device, width // 2, tokens)

    def __call__(self, x: Tensor, routing: Tensor, weights: Tensor | None, out: Tensor) -> None:
        """Runs both projections on the current stream; arguments as of `FewTokenExperts`, T <= max_tokens."""
        import torch

        tokens = x.shape[0]
        kernel, tuning = self._prepare(tokens, routing.dtype)
        act = torch.empty((tokens * self.active, self.up.rows // 2), dtype=torch.bfloat16, device=x.device)
        parts = self._parts(tokens)
        tensors = (x, routing, weights, self.expert_map, act, counters(self.device), parts, out)
        numbers = (ctypes.c_int(tokens), TWO_7, ctypes.c_float(self.alpha), ctypes.c_float(self.limit))
        arguments = [*self._weights(tuning.chunk), *map(pointer, tensors), *numbers]
        kernel(multiprocessors(self.device), tuning.threads, arguments)
