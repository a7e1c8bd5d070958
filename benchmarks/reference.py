"""gpt-oss in plain torch: the oracle that every numeric test compares with.

Slow and readable on purpose: one function per formula, shapes asserted, einsum axes named with the letters of
`vllm_gptoss.engine.spec` (T tokens, H query heads, K key/value heads, D head size, E experts, A active experts,
N output rows, C input columns, G groups of 32) and two more: S keys, M query heads per key/value head.

Precision: every function takes float64, float32 or bfloat16. Each computes in at least float32 (`wide`) and
rounds once on the way out, so float64 inputs give a float64 answer to compare kernels with, and float32
inputs give what transformers' `GptOssForCausalLM` computes in float32.

Sources: arXiv:2508.10925 (model), arXiv:2309.00071 (YaRN), arXiv:2309.17453 (attention sinks), OCP
Microscaling Formats (MX) v1.0 §5.3 and §6.3 (e2m1, e8m0), the checkpoint openai/gpt-oss-20b.
Not covered: batching, caches, speed, training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.model_config import ModelConfig, Yarn
from vllm_gptoss.engine import spec

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each 4-bit code; bit 3 is the sign."""

E8M0_BIAS = 127
E8M0_VALUES = (*(2.0 ** (code - E8M0_BIAS) for code in range(255)), math.nan)
"""Value of each scale byte; 255 is NaN (MX v1.0 §5.4.1)."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Norm, rotation, attention


def rms_norm(x: Tensor, weight: Tensor, eps: float = spec.RMS_NORM_EPS) -> Tensor:
    """Scale each row to root mean square 1, then by `weight`.

    x: [..., C]; weight: [C]; returns [..., C] in x's dtype.
    """
    assert weight.shape == x.shape[-1:]
    t = x.to(wide(x.dtype))
    t = t * torch.rsqrt(t.square().mean(-1, keepdim=True) + eps)
    return (t * weight.to(t.dtype)).to(x.dtype)


def yarn_frequencies(yarn: Yarn, head_size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Radians per position of each rotated pair, [D / 2] in `dtype`.

    Pairs that turn more than `beta_fast` times in the original context keep their frequency, those that turn
    less than `beta_slow` times are slowed by `factor`, a linear ramp over the pair's index joins the two.
    """
    period = yarn.theta ** (torch.arange(0, head_size, 2, dtype=dtype) / head_size)
    if yarn.factor <= 1:
        return 1.0 / period
    low, high = yarn.ramp(head_size)
    slowed = ((torch.arange(head_size // 2, dtype=dtype) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return slowed / (yarn.factor * period) + (1 - slowed) / period


def rope(x: Tensor, positions: Tensor, yarn: Yarn) -> Tensor:
    """Rotate pair (d, d + D/2) of each head by its position's angle, and scale by the concentration.

    x: [T, heads, D]; positions: [T] int; returns [T, heads, D] in x's dtype.
    In float32 the angle of position 131071 carries 131071 x 2^-24 = 0.008 rad of rounding.
    """
    tokens, _, head_size = x.shape
    assert positions.shape == (tokens,)
    t = x.to(wide(x.dtype))
    frequencies = yarn_frequencies(yarn, head_size, t.dtype).to(x.device)
    angles = torch.einsum("t,d->td", positions.to(t.dtype), frequencies)[:, None, :]
    cos, sin = angles.cos() * yarn.concentration, angles.sin() * yarn.concentration
    first, second = t.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Causal grouped-query attention. The softmax has one additional column, the head's sink, without a value.

    q: [T, H, D], the last T of S positions; k, v: [S, K, D], S >= T; sinks: [H] logits, never scaled;
    window: keys seen, the own one included, None for all; scale: on q·k, default D^-0.5.
    Returns [T, H, D] in q's dtype; T = 0 gives an empty result.
    """
    tokens, heads, head_size = q.shape
    keys, kv_heads, _ = k.shape
    assert k.shape == v.shape == (keys, kv_heads, head_size)
    assert sinks.shape == (heads,)
    assert heads % kv_heads == 0
    assert keys >= tokens
    dtype = wide(q.dtype)
    grouped = q.to(dtype).reshape(tokens, kv_heads, heads // kv_heads, head_size)
    logits = torch.einsum("tkmd,skd->kmts", grouped, k.to(dtype)) * (head_size**-0.5 if scale is None else scale)

    query_at = torch.arange(keys - tokens, keys, device=q.device)[:, None]
    key_at = torch.arange(keys, device=q.device)[None, :]
    seen = key_at <= query_at
    if window is not None:
        seen &= key_at > query_at - window
    logits = logits.masked_fill(~seen, -math.inf)

    sink = sinks.to(dtype).reshape(kv_heads, heads // kv_heads, 1, 1).expand(-1, -1, tokens, 1)
    weights = torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1)[..., :-1]
    out = torch.einsum("kmts,skd->tkmd", weights, v.to(dtype))
    return out.reshape(tokens, heads, head_size).to(q.dtype)


# Experts


def route(x: Tensor, weight: Tensor, bias: Tensor, active: int) -> tuple[Tensor, Tensor]:
    """Choose `active` experts per token; their weights are a softmax over the chosen logits only.

    x: [T, C]; weight: [E, C]; bias: [E].
    Returns (weights [T, A] in x's dtype, experts [T, A] int64), best first.
    """
    logits = linear(x, weight, bias)
    chosen, experts = logits.topk(active, dim=-1)
    return torch.softmax(chosen.to(wide(x.dtype)), dim=-1).to(x.dtype), experts


def swiglu(x: Tensor, *, alpha: float = spec.SWIGLU_ALPHA, limit: float = spec.SWIGLU_LIMIT) -> Tensor:
    """gate · sigmoid(alpha · gate) · (up + 1), with the gate clamped from above and up from both sides.

    x: [..., 2N], gate at even and up at odd columns; returns [..., N] in x's dtype.
    """
    t = x.to(wide(x.dtype))
    gate, up = t[..., ::2].clamp(max=limit), t[..., 1::2].clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(x.dtype)


def experts_forward(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    *,
    limit: float = spec.SWIGLU_LIMIT,
) -> Tensor:
    """Sum of each token's active experts, weighted.

    x: [T, C]; weights, experts: [T, A] of `route`; gate_up: [E, 2N, C], gate and up rows interleaved;
    gate_up_bias: [E, 2N]; down: [E, C, N]; down_bias: [E, C]. Returns [T, C] in x's dtype.
    Experts that no token chose are never touched.
    """
    total, _, columns = gate_up.shape
    assert x.shape[-1] == columns
    assert down.shape == (total, columns, gate_up.shape[1] // 2)
    out = torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device)
    for expert in experts.unique().tolist():
        token, slot = torch.where(experts == expert)
        inner = swiglu(linear(x[token], gate_up[expert], gate_up_bias[expert]), limit=limit)
        result = linear(inner, down[expert], down_bias[expert]).to(out.dtype)
        out.index_add_(0, token, result * weights[token, slot, None].to(out.dtype))
    return out.to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., C] times weight [N, C] plus bias [N], accumulated in `wide`; returns [..., N] in x's dtype."""
    dtype = wide(x.dtype)
    out = torch.einsum("...c,nc->...n", x.to(dtype), weight.to(dtype))
    return (out if bias is None else out + bias.to(dtype)).to(x.dtype)


# MXFP4: 32 values share one e8m0 scale; two e2m1 codes per byte, low nibble first


def mxfp4_unpack(blocks: Tensor) -> Tensor:
    """blocks: [..., G, 16] uint8; returns codes [..., 32G] uint8 below 16."""
    assert blocks.dtype == torch.uint8
    assert blocks.shape[-1] == spec.MXFP4_GROUP // 2
    codes = torch.stack([blocks & 0xF, blocks >> 4], dim=-1)
    return codes.reshape(*blocks.shape[:-2], blocks.shape[-2] * spec.MXFP4_GROUP)


def mxfp4_dequantise(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """e2m1 x 2^(scale - 127), exact in float64, then rounded to `dtype`.

    blocks: [..., G, 16] uint8; scales: [..., G] uint8 e8m0, one per 32 values along C; returns [..., 32G].
    """
    assert scales.dtype == torch.uint8
    assert scales.shape == blocks.shape[:-1]
    values, factors = (torch.tensor(t, dtype=torch.float64, device=blocks.device) for t in (E2M1_VALUES, E8M0_VALUES))
    scale = factors[scales.long()].repeat_interleave(spec.MXFP4_GROUP, dim=-1)
    return (values[mxfp4_unpack(blocks).long()] * scale).to(dtype)


# The model


@dataclass(frozen=True, slots=True)
class ReferenceLayer:
    """Rows are outputs: q [H·D, C]; k, v [K·D, C]; o [C, H·D]; gate_up [E, 2N, C]; down [E, C, N]."""

    window: int | None
    attention_norm: Tensor
    q: Tensor
    q_bias: Tensor
    k: Tensor
    k_bias: Tensor
    v: Tensor
    v_bias: Tensor
    o: Tensor
    o_bias: Tensor
    sinks: Tensor
    mlp_norm: Tensor
    router: Tensor
    router_bias: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor
    down: Tensor
    down_bias: Tensor


def attention_block(x: Tensor, layer: ReferenceLayer, config: ModelConfig, positions: Tensor) -> Tensor:
    """Norm, q/k/v, RoPE, sink attention, output projection, no residual. x: [T, C]; returns [T, C]."""
    t = rms_norm(x, layer.attention_norm, config.rms_norm_eps)
    q = linear(t, layer.q, layer.q_bias).unflatten(-1, (config.sizes.query_heads, config.sizes.head_size))
    k = linear(t, layer.k, layer.k_bias).unflatten(-1, (config.sizes.kv_heads, config.sizes.head_size))
    v = linear(t, layer.v, layer.v_bias).unflatten(-1, (config.sizes.kv_heads, config.sizes.head_size))
    q, k = rope(q, positions, config.yarn), rope(k, positions, config.yarn)
    out = sink_attention(q, k, v, layer.sinks, window=layer.window)
    return linear(out.flatten(-2), layer.o, layer.o_bias)


def mlp_block(x: Tensor, layer: ReferenceLayer, config: ModelConfig) -> Tensor:
    """Norm, router, experts, no residual. x: [T, C]; returns [T, C]."""
    t = rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
    weights, experts = route(t, layer.router, layer.router_bias, config.sizes.active_experts)
    return experts_forward(
        t,
        weights,
        experts,
        layer.gate_up,
        layer.gate_up_bias,
        layer.down,
        layer.down_bias,
        limit=config.swiglu_limit,
    )


def block(x: Tensor, layer: ReferenceLayer, config: ModelConfig) -> Tensor:
    """One layer with its residuals for one sequence from position 0. x: [T, C]; returns [T, C]."""
    x = x + attention_block(x, layer, config, torch.arange(len(x), device=x.device))
    return x + mlp_block(x, layer, config)


# Loading


def hidden_states_of(
    tensors: Mapping[str, Tensor], config: ModelConfig, sequences: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[Tensor]:
    """The normed last hidden states [T, C] of each sequence of token ids, with one layer at a time in `dtype`.

    tensors: `read_tensors`.
    """
    embedding = tensors["model.embed_tokens.weight"]
    xs = [embedding[torch.tensor(tokens, device=embedding.device)].to(dtype) for tokens in sequences]
    for index in range(config.sizes.layers):
        layer = layer_of(tensors, index, config, dtype)
        xs = [block(x, layer, config) for x in xs]
    return [rms_norm(x, tensors["model.norm.weight"].to(dtype), config.rms_norm_eps) for x in xs]


def read_tensors(directory: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Every tensor of a checkpoint, as it is stored."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(path, device=device))
    return tensors


def layer_of(tensors: Mapping[str, Tensor], index: int, config: ModelConfig, dtype: torch.dtype) -> ReferenceLayer:
    """Layer `index` of `tensors` (`read_tensors`), every weight dequantised to `dtype`."""
    prefix = f"model.layers.{index}."

    def get(name: str) -> Tensor:
        return tensors[prefix + name].to(dtype)

    def expert_weight(name: str) -> Tensor:
        blocks = tensors.get(f"{prefix}mlp.experts.{name}_blocks")
        if blocks is None:
            return get(f"mlp.experts.{name}").mT.contiguous()
        return mxfp4_dequantise(blocks, tensors[f"{prefix}mlp.experts.{name}_scales"], dtype)

    return ReferenceLayer(
        window=config.windows[index],
        attention_norm=get("input_layernorm.weight"),
        q=get("self_attn.q_proj.weight"),
        q_bias=get("self_attn.q_proj.bias"),
        k=get("self_attn.k_proj.weight"),
        k_bias=get("self_attn.k_proj.bias"),
        v=get("self_attn.v_proj.weight"),
        v_bias=get("self_attn.v_proj.bias"),
        o=get("self_attn.o_proj.weight"),
        o_bias=get("self_attn.o_proj.bias"),
        sinks=get("self_attn.sinks"),
        mlp_norm=get("post_attention_layernorm.weight"),
        router=get("mlp.router.weight"),
        router_bias=get("mlp.router.bias"),
        gate_up=expert_weight("gate_up_proj"),
        gate_up_bias=get("mlp.experts.gate_up_proj_bias"),
        down=expert_weight("down_proj"),
        down_bias=get("mlp.experts.down_proj_bias"),
    )
