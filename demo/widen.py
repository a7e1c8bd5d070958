"""The small model in a larger shape that answers alike, so that kernels made for gpt-oss's own sizes run on it.

Net2Net's wider and deeper transformations (arXiv:1511.05641): neurons and heads are copied, their readers divide by the
number of copies, and a new layer adds nothing. The parts are powers of two, so that every product is exact in
bf16 and MXFP4, and the two models differ by the order of their sums alone. A mean of squares over copies is the mean
over the originals: RMSNorm needs no change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from demo.model import Shape

LIKE_20B = Shape(hidden=2880, intermediate=2880, layers=6, experts=32, heads=64, kv_heads=8)
"""A layer of openai/gpt-oss-20b. Six layers: an EAGLE3 draft reads the states of three."""

NEVER = -30_000.0
"""The router's bias of an expert that was added: its weights are another's, and would show in the answer."""


def shifts(copies: int) -> list[int]:
    """Exponents s with a sum of 2**-s of one, as equal as possible."""
    out = [0]
    while len(out) < copies:
        out.sort()
        out[:1] = [out[0] + 1] * 2
    return out


def widen(shape: Shape, tensors: dict[str, Tensor], wide: Shape) -> dict[str, Tensor]:
    """Tensors of a published checkpoint of `shape` -> those of one of `wide` that answers alike.

    Raises:
        ValueError: a size is no multiple of the old one, or something else than sizes differs.
    """
    _check(shape, wide)
    hidden = wide.hidden // shape.hidden
    out = {
        "model.embed_tokens.weight": tensors["model.embed_tokens.weight"].repeat(1, hidden),
        "model.norm.weight": tensors["model.norm.weight"].repeat(hidden),
        "lm_head.weight": _shared(tensors["lm_head.weight"], shifts(hidden)),
    }
    for layer in range(wide.layers):
        of = layer if layer < shape.layers else layer % 2  # window and full attention alternate
        at = f"model.layers.{of}."
        mine = {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}
        made = _attention(shape, mine, wide) | _experts(shape, mine, wide)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            made[name] = mine[name].repeat(hidden)
        if layer >= shape.layers:
            for name in ("self_attn.o_proj.weight", "self_attn.o_proj.bias", "mlp.experts.down_proj_blocks"):
                made[name] = torch.zeros_like(made[name])
            made["mlp.experts.down_proj_bias"] = torch.zeros_like(made["mlp.experts.down_proj_bias"])
        out |= {f"model.layers.{layer}.{name}": tensor for name, tensor in made.items()}
    return {name: tensor.contiguous() for name, tensor in out.items()}


def _check(shape: Shape, wide: Shape) -> None:
    for name in ("hidden", "intermediate", "heads", "kv_heads", "experts"):
        if getattr(wide, name) % getattr(shape, name):
            raise ValueError(f"{name} {getattr(wide, name)} is no multiple of {getattr(shape, name)}")
    if (wide.heads // wide.kv_heads) % (shape.heads // shape.kv_heads):
        raise ValueError(f"{wide.heads} heads for {wide.kv_heads} key/value heads do not copy {shape.heads}")
    if wide.layers < shape.layers or (wide.layers - shape.layers) % 2:
        raise ValueError(f"{wide.layers} layers: layers are added in pairs, a windowed and a full one")
    sizes = ("hidden", "intermediate", "heads", "kv_heads", "experts", "layers")
    if replace(wide, **{name: getattr(shape, name) for name in sizes}) != shape:
        raise ValueError("only sizes may differ")


def _shared(weight: Tensor, parts: Sequence[int]) -> Tensor:
    """Columns read by a weight [..., C] bf16 -> [..., copies * C], each copy with its part of the weight."""
    return torch.cat([weight * 2.0**-part for part in parts], -1)


def _attention(shape: Shape, layer: dict[str, Tensor], wide: Shape) -> dict[str, Tensor]:
    """Key/value heads in turns; each group of query heads has its own of the small model in turns."""
    size, columns = shape.head_dim, shifts(wide.hidden // shape.hidden)
    kv_of = [head % shape.kv_heads for head in range(wide.kv_heads)]
    old, new = shape.heads // shape.kv_heads, wide.heads // wide.kv_heads
    query_of = [kv * old + head % old for kv in kv_of for head in range(new)]
    out = {"self_attn.sinks": layer["self_attn.sinks"][query_of]}
    for letter, of in (("q", query_of), ("k", kv_of), ("v", kv_of)):
        weight, bias = layer[f"self_attn.{letter}_proj.weight"], layer[f"self_attn.{letter}_proj.bias"]
        out[f"self_attn.{letter}_proj.weight"] = _shared(weight.unflatten(0, (-1, size))[of].flatten(0, 1), columns)
        out[f"self_attn.{letter}_proj.bias"] = bias.unflatten(0, (-1, size))[of].flatten()
    parts = shifts(wide.heads // shape.heads)
    factors = torch.tensor([2.0 ** -parts[query_of[:at].count(head)] for at, head in enumerate(query_of)])
    weight = layer["self_attn.o_proj.weight"].unflatten(-1, (-1, size))[:, query_of] * factors[:, None].bfloat16()
    out["self_attn.o_proj.weight"] = weight.flatten(1).repeat(len(columns), 1)
    out["self_attn.o_proj.bias"] = layer["self_attn.o_proj.bias"].repeat(len(columns))
    return out


def _experts(shape: Shape, layer: dict[str, Tensor], wide: Shape) -> dict[str, Tensor]:
    """The small model's experts, spread out among copies that the router never chooses."""
    hidden, inner = wide.hidden // shape.hidden, wide.intermediate // shape.intermediate
    step = wide.experts // shape.experts
    of = torch.arange(wide.experts) // step
    chosen = torch.arange(shape.experts) * step + torch.arange(shape.experts) % step
    router = torch.zeros(wide.experts, wide.hidden, dtype=torch.bfloat16)
    router[chosen] = _shared(layer["mlp.router.weight"], shifts(hidden))
    bias = torch.full([wide.experts], NEVER, dtype=torch.bfloat16)
    bias[chosen] = layer["mlp.router.bias"]
    out = {"mlp.router.weight": router, "mlp.router.bias": bias}
    for part, rows, columns in (("gate_up_proj", inner, hidden), ("down_proj", hidden, inner)):
        name = f"mlp.experts.{part}"
        parts, scales = shifts(columns), layer[f"{name}_scales"].int()
        tiled = torch.cat([(scales - part).clamp(min=0) for part in parts], -1).to(torch.uint8)
        out[f"{name}_scales"] = tiled.repeat(1, rows, 1)[of]
        out[f"{name}_blocks"] = layer[f"{name}_blocks"].repeat(1, rows, columns, 1)[of]
        out[f"{name}_bias"] = layer[f"{name}_bias"].repeat(1, rows)[of]
    return out
