"""MXFP4 experts for many tokens on sm90: two launches from router logits (or top-k ids) to the combined output.

`cuda/experts_many.cu` holds the kernels, docs/kernels/ the design and its numbers. The weights are the bytes that
`experts.py` and vLLM's own `matmul_ogs` read.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gptoss.kernels import nvrtc
from vllm_gptoss.kernels.experts import FewTokenExperts, Recipe, multiprocessors, partial_sums, routing_mode
from vllm_gptoss.kernels.experts_plan import PARTIAL_TOKENS, SHARED_LIMIT

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SOURCE = Path(__file__).parent / "cuda" / "experts_many.cu"
ONLY = {"experts_up": 1, "experts_down": 2}
MAX_TOKENS = PARTIAL_TOKENS
REGISTERS = {4: 96, 3: 128}
"""A thread's registers at the start, by the number of consuming warpgroups."""

TWO_7 = ctypes.c_uint32(1 << 7)
"""`two_7` of experts_many.cu."""


@dataclass(frozen=True)
class Tuning:
    """groups: consuming warpgroups of a block; depth: stages in a warp's ring, of `chunk` x 64 columns of weights;
    most: tokens of an expert that are multiplied at once."""

    groups: int
    depth: int
    chunk: int
    most: int

    @property
    def ring_bytes(self) -> int:
        """Of all warps."""
        return self.groups * 4 * self.depth * self.chunk * (512 + 32)


STREAMING, HOLDING = Tuning(groups=4, depth=3, chunk=3, most=64), Tuning(groups=3, depth=2, chunk=3, most=96)
"""Four groups stream the weights of few tokens an expert faster; three have the registers for 96 columns of products
and the shared memory to hold 32 rows of activations."""

STREAMED_PAIRS = 16
"""Pairs (a token and one of its experts) for each routed expert up to which `STREAMING` runs: 128 tokens of the 20b,
512 of the 120b, where `HOLDING` takes 4 % longer. At 512 tokens of the 20b it takes 14 % less (docs/kernels/log.md)."""


def tunings_for(routed: int, active: int) -> dict[int, Tuning]:
    """By the most tokens that each is compiled for."""
    streamed = min(MAX_TOKENS, STREAMED_PAIRS * routed // active)
    return {streamed: STREAMING} | ({MAX_TOKENS: HOLDING} if streamed < MAX_TOKENS else {})


def meta_bytes(tuning: Tuning, most: int, active: int, experts: int, down: bool) -> int:
    """Of `Meta` in experts_many.cu, rounded up."""
    pairs, chunks = most * active, experts + most * active // tuning.most
    size = 256 + 4 * tuning.most + 44 + 8 * chunks + (7 if down else 3) * pairs + 256
    return -(-size // 128) * 128


def x_bytes(tuning: Tuning, most: int, active: int, experts: int, down: bool) -> int:
    """What is left of shared memory for activations."""
    return (SHARED_LIMIT - tuning.ring_bytes - meta_bytes(tuning, most, active, experts, down)) // 1024 * 1024


def shared_bytes(tuning: Tuning, most: int, active: int, experts: int, down: bool) -> int:
    """Dynamic shared memory of one block."""
    sizes = (tuning, most, active, experts, down)
    return x_bytes(*sizes) + meta_bytes(*sizes) + tuning.ring_bytes


def compile_options(registers: int) -> list[str]:
    """NVRTC's: lambdas of the source are device functions without saying so."""
    return [f"--maxrregcount={registers}", "--device-as-default-execution-space"]


@functools.cache
def _kernel(recipe: Recipe) -> nvrtc.Kernel:
    import torch

    with torch.cuda.device(recipe.device):
        options = compile_options(recipe.registers)
        module = nvrtc.load(nvrtc.source(SOURCE), "sm_90a", dict(recipe.options), options)
        return module.kernel(recipe.name, recipe.shared)


class ManyTokenExperts:
    """Both projections of one layer's local experts, ready to launch: the weights of `few`, whatever it takes."""

    max_tokens = MAX_TOKENS

    def __init__(self, few: FewTokenExperts) -> None:
        self.up, self.down, self.active, self.routed = few.up, few.down, few.active, few.routed
        self.alpha, self.limit, self.expert_map, self.device = few.alpha, few.limit, few.expert_map, few.device
        self.tunings = tunings_for(few.routed, few.active)
        self._launches: dict[tuple[str, int, tuple[int, int]], nvrtc.Kernel] = {}

    def recipe(self, which: str, most: int, routing: torch.dtype) -> Recipe:
        """What the kernel `which` for up to `most` tokens, one of `tunings`, is compiled from for a routing dtype."""
        down, tuning = which == "experts_down", self.tunings[most]
        projection = self.down if down else self.up
        sizes = (tuning, most, self.active, projection.experts, down)
        logits, id64 = routing_mode(routing)
        options = {
            "TOKENS": most,
            "KT": projection.tiles,
            "NROWS": projection.rows,
            "SKT": projection.scales.shape[2] // 64,
            "EXPERTS": projection.experts,
            "ACTIVE": self.active,
            "ROUTED": self.routed,
            "GROUPS": tuning.groups,
            "DEPTH": tuning.depth,
            "CHUNK": tuning.chunk,
            "MOST": tuning.most,
            "X_BYTES": x_bytes(*sizes),
            "LOGITS": logits,
            "ID64": id64,
            "MAPPED": int(self.expert_map is not None),
            "ONLY": ONLY[which],
        }
        registers = REGISTERS[tuning.groups]
        return Recipe(self.device, which, shared_bytes(*sizes), registers, tuple(sorted(options.items())))

    def loads(self, routing: torch.dtype) -> Iterator[tuple[Callable[[Recipe], nvrtc.Kernel], Recipe]]:
        """Calls that load the kernels for a routing dtype: see `nvrtc.at_once`."""
        for which, most in itertools.product(ONLY, self.tunings):
            yield _kernel, self.recipe(which, most, routing)

    def launch_up(self, x: Tensor, routing: Tensor, act: Tensor, *, dependent: bool = True) -> None:
        """act[T * A, I] bf16 = SwiGLU of the up projection of x [T, hidden] bf16, T <= max_tokens."""
        tensors = (self.up.values, self.up.scales, self.up.bias, x, routing, None, self.expert_map, act)
        numbers = (ctypes.c_float(self.alpha), ctypes.c_float(self.limit))
        self._launch("experts_up", routing.dtype, tensors, x.shape[0], numbers, dependent)

    def launch_down(
        self, act: Tensor, routing: Tensor, weights: Tensor | None, out: Tensor, *, dependent: bool = True
    ) -> None:
        """out [T, hidden] bf16 = weighted sum of the down projections; `dependent` as `FewTokenExperts.launch_down`."""
        tensors = (self.down.values, self.down.scales, self.down.bias, act, routing, weights, self.expert_map)
        parts = partial_sums(self.device, self.active * self.down.rows, PARTIAL_TOKENS)
        self._launch("experts_down", routing.dtype, (*tensors, parts, out), out.shape[0], (), dependent)

    def _launch(
        self,
        which: str,
        routing: torch.dtype,
        tensors: tuple[Tensor | None, ...],
        tokens: int,
        numbers: tuple[ctypes.c_float, ...],
        dependent: bool,
    ) -> None:
        import torch

        if not 0 < tokens <= self.max_tokens:
            raise ValueError(f"1 to {self.max_tokens} tokens, got {tokens}")
        most = next(most for most in self.tunings if tokens <= most)
        key = (which, most, routing_mode(routing))
        if key not in self._launches:
            self._launches[key] = _kernel(self.recipe(which, most, routing))
        pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
        self._launches[key](
            multiprocessors(self.device),
            (self.tunings[most].groups + 1) * 128,
            torch.cuda.current_stream(self.device).cuda_stream,
            [*pointers, ctypes.c_int(tokens), TWO_7, *numbers],
            dependent=dependent,
        )

    def __call__(self, x: Tensor, routing: Tensor, weights: Tensor | None, out: Tensor) -> None:
        """Runs both projections on the current stream; arguments as of `FewTokenExperts`, T <= max_tokens."""
        import torch

        act = torch.empty((x.shape[0] * self.active, self.up.rows // 2), dtype=torch.bfloat16, device=x.device)
        self.launch_up(x, routing, act)
        self.launch_down(act, routing, weights, out)
