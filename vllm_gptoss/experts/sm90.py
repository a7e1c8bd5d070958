"""Experts of one layer on sm90: our kernels for few tokens, over the weights that vLLM's `matmul_ogs` reads for many.

`prepare` takes the weights after upstream has laid them out, so nothing is stored twice and prefill stays upstream's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_gptoss import spec
from vllm_gptoss.kernels import mxfp4
from vllm_gptoss.kernels.experts import MAX_EXPERTS, FewTokenExperts, Projection, partial_sums

MAX_SCALE = 192
"""Largest e8m0 code that the kernel's arithmetic holds, a factor of 2^65."""


SAMPLED_VALUES, SAMPLED_SCALES = (slice(1), slice(32), slice(512)), (slice(1), slice(512), slice(32))
"""Experts, rows and bytes of a row whose layout is compared: two tiles of values, two blocks of scales. Few enough for
one thread: torch puts 32,768 elements on all cores, where engines that start together wait for one another (59 s of
loading instead of 4, five of them on one host). Kept on the host, see `reserve`.
"""


class LayoutError(ValueError):
    """The weights do not lie as the kernels read them; the message says what differs."""


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


def reserve(down: Tensor, active: int) -> None:
    """Takes what the kernels keep on the GPU, before upstream lays the first layer out.

    Upstream frees a GiB and takes a GiB, layer by layer; a tensor of ours that lands in between, however small, can
    split a freed block, and the peak of loading is a block higher.

    down: the down projection's blocks as loaded, [E, hidden, I/2] u8; active: experts per token.
    """
    if down.is_cuda:
        partial_sums(down.device.index or 0, active * down.shape[1])


def sample(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """A corner of the first expert as our index maps store it, to compare with what upstream stores."""
    return mxfp4.hopper_values(blocks[SAMPLED_VALUES].cpu()), mxfp4.hopper_scales(scales[SAMPLED_SCALES].cpu())


def scales_fit(scales: Tensor) -> bool:
    """Whether every e8m0 code of the tensor is one that the kernel's arithmetic holds."""
    return int(scales.max()) <= MAX_SCALE


def _begins_with(stored: Tensor, wanted: Tensor) -> bool:
    return bool(torch.equal(stored[:1, : wanted.shape[1], : wanted.shape[2]].cpu(), wanted))


def prepare(
    up: Projection,
    down: Projection,
    *,
    active: int,
    routed: int,
    alpha: float = spec.SWIGLU_ALPHA,
    limit: float = spec.SWIGLU_LIMIT,
    expert_map: Tensor | None = None,
    expected: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> FewTokenExperts:
    """Wraps one layer's weights, and compiles its kernels for bfloat16 router logits.

    expected: `sample` of both projections before upstream laid them out; a mismatch means that upstream's layout has
    changed.

    Raises:
        LayoutError: the weights are not in the layout, or have a shape, that the kernels read.
    """
    if up.experts > MAX_EXPERTS:
        raise LayoutError(f"{up.experts} experts on one rank, at most {MAX_EXPERTS}")
    for projection, wanted in zip((up, down), expected or (None, None), strict=True):
        if wanted is not None and not (
            _begins_with(projection.values, wanted[0]) and _begins_with(projection.scales, wanted[1])
        ):
            raise LayoutError("upstream's Hopper layout is not the one these kernels read")
    try:
        experts = FewTokenExperts(up, down, active, routed, alpha=alpha, limit=limit, expert_map=expert_map)
    except ValueError as error:
        raise LayoutError(str(error)) from None
    experts.compile(torch.bfloat16, experts.max_tokens)
    return experts


def apply(experts: FewTokenExperts, x: Tensor, router_logits: Tensor) -> Tensor:
    """The layer's output before any all-reduce, [T, hidden] bf16.

    x: [T, hidden] bf16, 1 <= T <= experts.max_tokens; router_logits: [T, E] bf16 or f32.
    """
    x, router_logits = x.contiguous(), router_logits.contiguous()
    out = torch.empty_like(x)
    experts(x, router_logits, None, out)
    return out
