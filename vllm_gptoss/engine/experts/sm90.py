"""Experts of one layer on sm90: our kernels over the weights that vLLM's `matmul_ogs` reads.

`prepare` takes the weights after upstream has laid them out, so nothing is stored twice and any step can be upstream's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vllm_gptoss.engine import spec
from vllm_gptoss.engine.choose import bands
from vllm_gptoss.engine.experts import mxfp4
from vllm_gptoss.engine.kernels import nvrtc
from vllm_gptoss.engine.kernels.experts import FewTokenExperts, Projection, partial_sums, partial_tokens
from vllm_gptoss.engine.kernels.experts_many import ManyTokenExperts
from vllm_gptoss.engine.kernels.experts_plan import MAX_TOKENS, NARROW_TOKENS, WIDE_TOKENS
from vllm_gptoss.engine.kernels.experts_prefill import PrefillExperts

Kernel: TypeAlias = FewTokenExperts | ManyTokenExperts | PrefillExperts

SAMPLED_VALUES, SAMPLED_SCALES = (slice(1), slice(32), slice(512)), (slice(1), slice(512), slice(32))
"""Slices of experts, rows and bytes of a row for the layout comparison: two tiles of values, two blocks of scales.

torch processes these sizes on one thread. It distributes 32,768 elements over all cores, which takes 59 s of loading
instead of 4 if five engines start on one host. Stored on the host, see `reserve`.
"""


@dataclass(frozen=True)
class LayerExperts:
    """The kernels of one layer: for few tokens, many, and more. The last two are both present or both None."""

    few: FewTokenExperts
    many: ManyTokenExperts | None = None
    prefill: PrefillExperts | None = None

    def kernel(self, tokens: int) -> Kernel | None:
        """What runs a step of so many tokens, or None."""
        few, many = self.few, self.many
        if many is None:
            return few if 0 < tokens <= few.max_tokens else None
        if tokens <= many.max_tokens:
            return None if tokens < 1 else few if tokens <= most_of_few(few) else many
        return self.prefill

    def loads(self, routing: torch.dtype, most: int) -> Iterator[tuple[Any, ...]]:
        """Calls that load the kernels of steps of up to `most` tokens: see `nvrtc.at_once`."""
        few = most_of_few(self.few) if self.many else self.few.max_tokens
        yield from self.few.loads(routing, min(most, few))
        if self.many is not None and most > few:
            yield from self.many.loads(routing, most)
        if self.many is not None and self.prefill is not None and most > self.many.max_tokens:
            yield from self.prefill.loads(routing)


class LayoutError(ValueError):
    """The weights are not in the layout of the kernels; the message has the difference."""


def storage(wrapped: Any, layout: str) -> Tensor:
    """The bytes behind a `triton_kernels` tensor of the Hopper layout `layout`, as the kernel indexes them.

    Raises:
        LayoutError: another layout, or bytes that are not contiguous along the last axis of the layout.
    """
    stored = wrapped.storage
    name = getattr(stored.layout, "name", type(stored.layout).__name__)
    if name != layout:
        raise LayoutError(f"the weights are stored as {name}, not {layout}")
    data: Tensor = stored.data.mT
    if data.dim() != 3 or not data.is_contiguous():
        raise LayoutError(f"{layout} of shape {list(data.shape)} and strides {data.stride()} is not [E, rows, bytes]")
    return data


def reserve(down: Tensor, active: int, most: int) -> None:
    """Allocates the kernels' permanent GPU buffers before vLLM converts the first layer's weights.

    vLLM frees a GiB and allocates a GiB for each layer. A plugin tensor allocated between the two, however small, can
    split a freed block. The peak memory of loading would then be one block higher.

    down: the down projection's blocks as loaded, [E, hidden, I/2] u8; active: experts per token; most: tokens of the
    largest step that the kernels will run.
    """
    if down.is_cuda:
        for tokens in {partial_tokens(1), partial_tokens(most)}:
            partial_sums(down.device.index or 0, active * down.shape[1], tokens)


def sample(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """A corner of the first expert as our index maps store it, to compare with what upstream stores."""
    return mxfp4.hopper_values(blocks[SAMPLED_VALUES].cpu()), mxfp4.hopper_scales(scales[SAMPLED_SCALES].cpu())


def _begins_with(stored: Tensor, wanted: Tensor) -> bool:
    return bool(torch.equal(stored[:1, : wanted.shape[1], : wanted.shape[2]].cpu(), wanted))


def prepare(
    up: Projection,
    down: Projection,
    *,
    active: int,
    routed: int,
    most: int = bands.MANY_TOKENS,
    alpha: float = spec.SWIGLU_ALPHA,
    limit: float = spec.SWIGLU_LIMIT,
    expert_map: Tensor | None = None,
    expected: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> LayerExperts:
    """Wraps one layer's weights, and compiles its kernels for bfloat16 router logits.

    Compiles only the kernels for few tokens if steps have at most 64 tokens or the GPU has too few multiprocessors: the
    other kernels are not measured there.

    most: tokens of the largest step; buffers for a step of this size stay allocated between steps.
    expected: `sample` of both projections before upstream laid them out; a mismatch means that upstream's layout has
    changed.

    Raises:
        LayoutError: the weights are not in the layout, or have a shape, that the kernels read.
    """
    for projection, wanted in zip((up, down), expected or (None, None), strict=True):
        if wanted is not None and not (
            _begins_with(projection.values, wanted[0]) and _begins_with(projection.scales, wanted[1])
        ):
            raise LayoutError("upstream's Hopper layout is not the one these kernels read")
    try:
        few = FewTokenExperts(up, down, active, routed, alpha=alpha, limit=limit, expert_map=expert_map)
        whole = most > WIDE_TOKENS and few.max_tokens == MAX_TOKENS
        layer = LayerExperts(few, ManyTokenExperts(few), PrefillExperts(few)) if whole else LayerExperts(few)
    except ValueError as error:
        raise LayoutError(str(error)) from None
    nvrtc.at_once(layer.loads(torch.bfloat16, sys.maxsize if whole else most))
    for tokens in {partial_tokens(1), partial_tokens(most)}:
        partial_sums(few.device, active * down.rows, tokens)
    return layer


def most_of_few(few: FewTokenExperts) -> int:
    """Tokens up to which the kernels for few run, where there are those for many."""
    evenly = bands.MANY_PAIRS * few.routed // few.active
    most: int = min(MAX_TOKENS, max(NARROW_TOKENS, evenly))
    return most


def apply(experts: Kernel, x: Tensor, router_logits: Tensor) -> Tensor:
    """The layer's output before any all-reduce, [T, hidden] bf16.

    x: [T, hidden] bf16, T as the kernel takes them; router_logits: [T, E] bf16 or f32.
    """
    x, router_logits = x.contiguous(), router_logits.contiguous()
    out = torch.empty_like(x)
    experts(x, router_logits, None, out)
    return out
