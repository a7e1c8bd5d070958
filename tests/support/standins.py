"""The few-token kernels' contracts in torch, by the oracle: what `FusedPath` calls where there is no GPU.

Same arguments as `engine/kernels/dense.py`, `engine/kernels/attention.py` and `engine/kernels/experts.py`, any float
dtype: computed in at least float32, rounded once into the outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks import reference
from tests.support import fp8
from vllm_gptoss.engine.experts import mxfp4
from vllm_gptoss.engine.kernels.cache import Fp8Cache, PagedCache

HEAD = 64


def _normed(x: Tensor, residual: Tensor | None, out: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    total = x if residual is None else x + residual
    if out is not None:
        out.copy_(total)
    return reference.rms_norm(total.to(reference.wide(x.dtype)), weight, eps)


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    cos, sin = cos_sin[positions].to(x.dtype).chunk(2, dim=-1)
    low, high = x.unflatten(-1, (-1, HEAD)).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def store(rows: Tensor, slots: Tensor, kv_cache: PagedCache) -> None:
    """rows: [T, K, 128], keys and values; a token with a negative slot has none."""
    block = kv_cache.shape[2]
    if isinstance(kv_cache, Fp8Cache):
        rows, kv_cache = fp8.codes(rows, kv_cache.k_scale, kv_cache.v_scale), kv_cache.tensor
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            kv_cache[slot // block, :, slot % block] = rows[token].to(kv_cache.dtype)


def qkv_rope(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    weight: Tensor,
    bias: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    kv_cache: PagedCache,
    q: Tensor,
    residual_out: Tensor | None,
    eps: float,
) -> None:
    kv_heads = kv_cache.shape[1]
    product = reference.linear(_normed(x, residual, residual_out, norm, eps), weight, bias)
    query, key, value = product.split([q.shape[1], kv_heads * HEAD, kv_heads * HEAD], dim=-1)
    q.copy_(rotate(query, cos_sin, positions).flatten(1))
    rows = torch.cat([rotate(key, cos_sin, positions), value.unflatten(-1, (-1, HEAD))], dim=-1)
    store(rows, slots[: x.shape[0]], kv_cache)


def attend(
    q: Tensor,
    kv_cache: PagedCache,
    sinks: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    out: Tensor,
    scale: float,
    window: int,
) -> None:
    block, cached = kv_cache.shape[2], fp8.values(kv_cache)
    out.zero_()
    for request, length in enumerate(seq_lens.tolist()):
        mine = slice(int(query_start[request]), int(query_start[request + 1]))
        at = torch.arange(length)
        rows = cached[block_table[request, at // block].long(), :, at % block]
        heads = q[mine].unflatten(-1, (-1, HEAD))
        got = reference.sink_attention(
            heads.to(rows.dtype), rows[..., :HEAD], rows[..., HEAD:], sinks, window=window or None, scale=scale
        )
        out[mine] = got.flatten(1)


def out_proj(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    total = reference.linear(x.to(reference.wide(x.dtype)), weight, bias)
    out.copy_(total if residual is None else total + residual)


def router(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    weight: Tensor,
    bias: Tensor,
    normed: Tensor,
    weights: Tensor,
    ids: Tensor,
    eps: float,
    residual_out: Tensor | None = None,
    logits: Tensor | None = None,
) -> None:
    t = _normed(x, residual, residual_out, norm, eps)
    normed.copy_(t)
    chosen, experts = reference.route(t, weight, bias, ids.shape[1])
    weights.copy_(chosen)
    ids.copy_(experts)
    if logits is not None:
        logits.copy_(reference.linear(t, weight, bias))


class Experts:
    """One rank's experts over the MXFP4 parameters as vLLM's loader left them."""

    def __init__(self, layer: Any) -> None:
        self.up = mxfp4.dequantize(layer.w13_weight.data, layer.w13_weight_scale.data, torch.float32)
        self.down = mxfp4.dequantize(layer.w2_weight.data, layer.w2_weight_scale.data, torch.float32)
        self.up_bias, self.down_bias = layer.w13_bias.data.float(), layer.w2_bias.data.float()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        out.copy_(reference.experts_forward(x, weights, ids.long(), self.up, self.up_bias, self.down, self.down_bias))
