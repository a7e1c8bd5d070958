"""One layer in six launches: the chain that the model, benchmarks and tests run.

`qkv_rope` (residual, RMSNorm, projection, bias, RoPE, cache write), `attend` (sinks, window), `out_proj` (bias,
residual), `router` (RMSNorm, projection, top-k, softmax), then the experts, up and down. Each launch may start while
the one before ends (programmatic dependent launch). Nothing here knows vLLM.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_gptoss.engine.kernels import attention, dense
from vllm_gptoss.engine.kernels.cache import PagedCache
from vllm_gptoss.engine.kernels.layer import LayerTensors, Requests
from vllm_gptoss.engine.spec import RMS_NORM_EPS

Reduce = Callable[[Tensor, int], Tensor]
"""Sums a tensor over the ranks: (addend [T, C] bf16, `AFTER_ATTENTION` or `AFTER_EXPERTS`) to [T, C] bf16."""
AFTER_ATTENTION, AFTER_EXPERTS = 0, 1
"""Generations of `engine/kernels/all_reduce.py`: a layer has one call of each, so no two in succession are alike."""
OtherExperts = Callable[[Tensor, Tensor], Tensor]
"""Experts of another backend: (normed [T, C] bf16, router logits [T, E] f32) to [T, C] bf16, summed over the ranks."""


def layer(
    tensors: LayerTensors,
    cache: PagedCache,
    requests: Requests,
    positions: Tensor,
    x: Tensor,
    residual: Tensor | None,
    *,
    reduce: Reduce | None = None,
    others: OtherExperts | None = None,
) -> tuple[Tensor, Tensor]:
    """(the experts' output, the sum they are to be added to), both [T, C] bf16.

    x, residual: [T, C] bf16, T <= 16, added up first; cache: [blocks, K, block size, 128]; positions: [T] int64;
    reduce: where several ranks share the layer; others: where `tensors` has no experts.
    """
    q, summed = project(tensors, cache, requests, positions, x, residual)
    attended = attend(tensors, cache, requests, q)
    hidden = output(tensors, attended, None if reduce else summed)
    if reduce is None:
        return experts(tensors, *route(tensors, hidden, None, others is not None), reduce, others), hidden
    total = torch.empty_like(hidden)
    routed = route(tensors, reduce(hidden, AFTER_ATTENTION), summed, others is not None, total)
    return experts(tensors, *routed, reduce, others), total


def project(
    tensors: LayerTensors, cache: PagedCache, requests: Requests, positions: Tensor, x: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(queries [T, H * 64] bf16, x + residual [T, C] bf16); keys and values go into the cache."""
    q = x.new_empty((x.shape[0], tensors.out_weight.shape[1]))
    summed = None if residual is None else torch.empty_like(x)
    dense.qkv_rope(
        x,
        residual,
        tensors.norm,
        tensors.qkv_weight,
        tensors.qkv_bias,
        positions,
        tensors.cos_sin,
        requests.slots,
        cache,
        q,
        summed,
        RMS_NORM_EPS,
    )
    return q, x if summed is None else summed


def attend(
    tensors: LayerTensors,
    cache: PagedCache,
    requests: Requests,
    q: Tensor,
    kernel: Callable[..., None] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention over the cache, [T, H * 64] bf16. kernel: takes what `attention.attend` does, which it is if None; out:
    where it writes, if not to such a tensor."""
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    (kernel or attention.attend)(
        q,
        cache,
        tensors.sinks,
        requests.block_table,
        requests.seq_lens,
        requests.query_start,
        out,
        attention.HEAD**-0.5,
        tensors.window,
    )
    return out


def output(tensors: LayerTensors, attended: Tensor, residual: Tensor | None) -> Tensor:
    """The output projection, [T, C] bf16, with the residual where one rank has all of it."""
    out = attended.new_empty((attended.shape[0], tensors.out_weight.shape[0]))
    dense.out_proj(attended, tensors.out_weight, tensors.out_bias, residual, out)
    return out


def route(
    tensors: LayerTensors,
    x: Tensor,
    residual: Tensor | None,
    keep_logits: bool,
    total: Tensor | None = None,
    kernel: Callable[..., None] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(norm(x + residual) [T, C] bf16, ids [T, A] int32, weights [T, A] f32, logits [T, E] f32 or None).

    total: [T, C] bf16, receives x + residual; kernel: has the signature of `dense.router`, which is the default.
    """
    tokens, routed = x.shape[0], tensors.router_weight.shape[0]
    normed = torch.empty_like(x)
    weights = x.new_empty((tokens, tensors.active), dtype=torch.float32)
    ids = x.new_empty((tokens, tensors.active), dtype=torch.int32)
    logits = x.new_empty((tokens, routed), dtype=torch.float32) if keep_logits else None
    (kernel or dense.router)(
        x,
        residual,
        tensors.post_norm,
        tensors.router_weight,
        tensors.router_bias,
        normed,
        weights,
        ids,
        RMS_NORM_EPS,
        residual_out=total,
        logits=logits,
    )
    return normed, ids, weights, logits


def experts(
    tensors: LayerTensors,
    normed: Tensor,
    ids: Tensor,
    weights: Tensor,
    logits: Tensor | None,
    reduce: Reduce | None,
    others: OtherExperts | None,
) -> Tensor:
    """The weighted sum of the chosen experts, [T, C] bf16."""
    if others is not None:
        assert logits is not None
        return others(normed, logits)
    assert tensors.experts is not None
    out = torch.empty_like(normed)
    tensors.experts(normed, ids, weights, out)
    return out if reduce is None else reduce(out, AFTER_EXPERTS)
