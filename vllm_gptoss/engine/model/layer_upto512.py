"""One layer of a decode step of 17 to 512 tokens: two matrix products (cuBLAS or plugin), then plugin kernels.

`norm` (residual, RMSNorm), the q/k/v product, `rope` (RoPE, cache write), attention (sinks, window), the output
product, `router` (residual, RMSNorm, product, top-k, softmax), then the experts. Our q/k/v product
includes `rope`. As in `layer_upto16`, a launch may start while the previous one ends (PDL). This file does not use
vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from vllm_gptoss.engine.choose import bands
from vllm_gptoss.engine.kernels import attention_many, norm_rope_router, product_many
from vllm_gptoss.engine.kernels.cache import PagedCache
from vllm_gptoss.engine.kernels.layer import LayerTensors, Requests
from vllm_gptoss.engine.model import layer_upto16
from vllm_gptoss.engine.spec import RMS_NORM_EPS

Experts = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(normed [T, C] bf16, ids [T, A] int32, weights [T, A] f32, out [T, C] bf16): the weighted sum of the chosen."""


def layer(
    tensors: LayerTensors,
    experts: Experts,
    cache: PagedCache,
    requests: Requests,
    positions: Tensor,
    x: Tensor,
    residual: Tensor | None,
    reduce: layer_upto16.Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """(the experts' output, the sum they are to be added to), both [T, C] bf16.

    x, residual: [T, C] bf16, added up first; cache: [blocks, K, block size, 128];
    positions: [T] int64; reduce: where several ranks share the layer.
    """
    own = x.shape[0] <= bands.PRODUCT_TOKENS and product_many.fits(tensors.qkv_weight, tensors.out_weight)
    q, summed = project(tensors, cache, requests, positions, x, residual, own=own)
    product = attend(tensors, cache, requests, q, own=own)
    if reduce is not None:
        product = reduce(product, layer_upto16.AFTER_ATTENTION)
    total = torch.empty_like(product)
    normed, ids, weights, _ = layer_upto16.route(tensors, product, summed, False, total, norm_rope_router.router)
    out = torch.empty_like(normed)
    experts(normed, ids, weights, out)
    return out if reduce is None else reduce(out, layer_upto16.AFTER_EXPERTS), total


def project(
    tensors: LayerTensors,
    cache: PagedCache,
    requests: Requests,
    positions: Tensor,
    x: Tensor,
    residual: Tensor | None,
    *,
    own: bool,
) -> tuple[Tensor, Tensor]:
    """(queries, [T, H * 64] bf16 of rows that are longer, x + residual [T, C] bf16); keys and values go into the
    cache."""
    summed = None if residual is None else torch.empty_like(x)
    weight, bias = tensors.qkv_weight, tensors.qkv_bias
    normed = product_many.tiled(x, x.shape[1]) if own else torch.empty_like(x)
    norm_rope_router.norm(x, residual, tensors.norm, normed, summed, RMS_NORM_EPS, normed.shape[1] if own else 0)
    where = (positions, tensors.cos_sin, requests.slots, cache)
    if own:
        qkv = x.new_empty((x.shape[0], weight.shape[0]))
        product_many.rotated(normed, weight, bias, qkv, *where)
    else:
        qkv = linear(normed, weight, bias)
        norm_rope_router.rope(qkv, *where)
    return qkv[:, : tensors.out_weight.shape[1]], x if summed is None else summed


def attend(tensors: LayerTensors, cache: PagedCache, requests: Requests, q: Tensor, *, own: bool) -> Tensor:
    """Attention and the output product, [T, C] bf16."""
    if not own:
        attended = layer_upto16.attend(tensors, cache, requests, q, attention_many.attend)
        return linear(attended, tensors.out_weight, tensors.out_bias)
    tiled, out = product_many.tiled(q, q.shape[1]), q.new_empty((q.shape[0], tensors.out_weight.shape[0]))
    kernel = functools.partial(attention_many.attend, padded=tiled.shape[1])
    attended = layer_upto16.attend(tensors, cache, requests, q, kernel, tiled)
    product_many.product(attended, tensors.out_weight, tensors.out_bias, out)
    return out
