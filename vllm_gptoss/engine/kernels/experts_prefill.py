"""MXFP4 experts for large steps on sm90: three launches from router logits (or top-k ids) to the combined output.

`cuda/experts_prefill.cu` holds the kernels, docs/kernels/ the design and its numbers. The weights are the bytes that
`experts.py` and vLLM's own `matmul_ogs` read.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gptoss.engine.kernels import nvrtc, scratch
from vllm_gptoss.engine.kernels.experts import (
    CompileJob,
    FewTokenExperts,
    SameLayer,
    multiprocessors,
    pointer,
    routing_mode,
)
from vllm_gptoss.engine.kernels.experts_plan import MAX_EXPERTS, SHARED_LIMIT

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SOURCE = Path(__file__).parent / "cuda" / "experts_prefill.cu"
NAMES = ROUTE, EXPERTS, COMBINE = "prefill_route", "prefill_experts", "prefill_combine"
SLICE_TOKENS = 8192
"""Tokens of one pass at most: larger steps are several, one after the other in the same memory, 378 MB."""
ROUTERS, ADDERS, THREADS = 128, 256, 512
"""Threads of a block of the three kernels; of the first also its tokens."""
MOST, STAGES, AHEAD = 192, 7, 4
"""Tokens of a chunk, stages of 64 columns, tiles of work that a block knows of: as in experts_prefill.cu."""
MOST_ACTIVE = 8
STATE_BYTES = 2048
"""Of `State`, rounded up."""
CHUNKS_BYTES = -(-4 * (MAX_EXPERTS + SLICE_TOKENS * MOST_ACTIVE // MOST) // 16) * 16
"""Of a count for each chunk that a slice can have."""
REGISTERS = 128
"""A thread's, before the warps share them out by their roles."""

TWO_7 = ctypes.c_uint32(1 << 7)
"""`two_7` of experts_prefill.cu."""


class _Routing(ctypes.Structure):
    # `Routing` of experts_prefill.cu.
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("state", "ready", "seen", "tokens", "slots", "weights"))


def shared_bytes(experts: int) -> int:
    """Dynamic shared memory of a block of `prefill_experts`."""
    meta = STAGES * 16 + AHEAD * (16 + 24) + 2 * (experts + 1) * 4
    return STAGES * (MOST * 128 + 12 * (512 + 32)) + -(-(-(-meta // 8) * 8) // 128) * 128


def slice_of(tokens: int) -> int:
    """Tokens of one pass of a step: passes are alike."""
    return -(-tokens // -(-tokens // SLICE_TOKENS))


@functools.cache
def _kernels(recipe: CompileJob) -> tuple[nvrtc.Kernel, ...]:
    """The three, of one cubin."""
    options = [f"--maxrregcount={recipe.registers}"]
    module = nvrtc.load(recipe.device, SOURCE, "sm_90a", dict(recipe.options), options)
    return tuple(module.kernel(name, recipe.shared if name == EXPERTS else 0) for name in NAMES)


@scratch.keep
def state(device: int) -> Tensor:
    """`State` of experts_prefill.cu and, behind it, the counts of chunks and of pairs of blocks of routing.

    Two streams must not run these kernels at the same time, as with `partial_sums`.
    """
    import torch

    size = STATE_BYTES + CHUNKS_BYTES + 2 * MAX_EXPERTS * (SLICE_TOKENS // ROUTERS)
    return torch.zeros(size, dtype=torch.uint8, device=f"cuda:{device}")


class PrefillExperts(SameLayer):
    """Both projections of one layer's local experts, for steps of any size."""

    def __init__(self, few: FewTokenExperts | SameLayer) -> None:
        super().__init__(few)
        if not 1 <= self.active <= MOST_ACTIVE:
            raise ValueError(f"{self.active} experts a token, not 1 to {MOST_ACTIVE}")
        if shared_bytes(self.up.experts) > SHARED_LIMIT:
            raise ValueError(f"{self.up.experts} experts do not fit into {SHARED_LIMIT} bytes of shared memory")
        self._launches: dict[tuple[int, int], tuple[nvrtc.Kernel, ...]] = {}

    def recipe(self, routing: torch.dtype) -> CompileJob:
        """What the three kernels are compiled from for a routing dtype."""
        options = {**self.macros(routing), "BLOCKS": SLICE_TOKENS // ROUTERS}
        return CompileJob(
            self.device, EXPERTS, shared_bytes(self.up.experts), REGISTERS, tuple(sorted(options.items()))
        )

    def loads(self, routing: torch.dtype) -> Iterator[tuple[Callable[..., object], Hashable]]:
        """Calls that load the kernels for a routing dtype and what they keep: see `nvrtc.at_once`."""
        yield _kernels, self.recipe(routing)
        yield state, self.device

    def workspace_bytes(self, tokens: int) -> int:
        """What a step of so many tokens takes while it runs: both projections' outputs and lists of pairs."""
        size: int = slice_of(tokens) * self.active * (self.up.rows + 2 * self.down.rows + 12)
        return size

    def __call__(self, x: Tensor, routing: Tensor, weights: Tensor | None, out: Tensor) -> None:
        """Runs both projections on the current stream; arguments as of `FewTokenExperts`, any T."""
        import torch

        tokens = x.shape[0]
        if tokens < 1:
            raise ValueError("no tokens")
        mode = routing_mode(routing.dtype)
        if mode not in self._launches:
            self._launches[mode] = _kernels(self.recipe(routing.dtype))
        workspace = torch.empty(self.workspace_bytes(tokens), dtype=torch.uint8, device=x.device)
        each = slice_of(tokens)
        for first in range(0, tokens, each):
            here = slice(first, first + each)
            self._run(mode, x[here], routing[here], None if weights is None else weights[here], out[here], workspace)

    def _run(
        self,
        mode: tuple[int, int],
        x: Tensor,
        routing: Tensor,
        weights: Tensor | None,
        out: Tensor,
        workspace: Tensor,
    ) -> None:
        tokens, pairs = x.shape[0], x.shape[0] * self.active
        route, experts, combine = self._launches[mode]
        act, kept = workspace.data_ptr(), state(self.device).data_ptr()
        parts = act + pairs * self.up.rows
        lists = parts + pairs * 2 * self.down.rows
        chunks = kept + STATE_BYTES
        to = _Routing(kept, chunks, chunks + CHUNKS_BYTES, lists, lists + 4 * pairs, lists + 8 * pairs)
        count = ctypes.c_int(tokens)
        route(-(-tokens // ROUTERS), ROUTERS, [*map(pointer, (routing, weights, self.expert_map)), to, count])
        buffers = (ctypes.c_void_p(act), ctypes.c_void_p(parts))
        numbers = (TWO_7, ctypes.c_float(self.alpha), ctypes.c_float(self.limit))
        experts(multiprocessors(self.device), THREADS, [*map(pointer, (*self.matrices, x)), to, *buffers, *numbers])
        sums = (ctypes.c_void_p(to.slots), ctypes.c_void_p(to.weights), buffers[1], pointer(out), count)
        combine(-(-tokens * (self.down.rows // 8) // ADDERS), ADDERS, list(sums))
