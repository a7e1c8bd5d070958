"""Every tensor of a gpt-oss checkpoint: its name on disk, its axes, its shape and dtypes.

One table per format, over the axes below, which `check` compares files with. Sources: the safetensors headers of
openai/gpt-oss-20b (MXFP4), the names transformers' `GptOssForCausalLM` saves (BF16), and vLLM 0.32 and 0.33
`GptOssModel._load_weights_quark` (Quark).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vllm_gptoss.engine import spec
from vllm_gptoss.engine.checkpoint.config import Config

Format = Literal["mxfp4", "bf16", "quark"]

FLOATS = frozenset({"BF16", "F16", "F32"})
BYTES = frozenset({"U8"})
FP8 = frozenset({"F8_E4M3"})

Axes = tuple[str, ...]

DENSE: Mapping[str, Axes] = {
    "model.embed_tokens.weight": ("vocabulary", "hidden"),
    "model.norm.weight": ("hidden",),
    "lm_head.weight": ("vocabulary", "hidden"),
}

LAYER: Mapping[str, Axes] = {
    "input_layernorm.weight": ("hidden",),
    "self_attn.q_proj.weight": ("query", "hidden"),
    "self_attn.q_proj.bias": ("query",),
    "self_attn.k_proj.weight": ("key", "hidden"),
    "self_attn.k_proj.bias": ("key",),
    "self_attn.v_proj.weight": ("key", "hidden"),
    "self_attn.v_proj.bias": ("key",),
    "self_attn.o_proj.weight": ("hidden", "query"),
    "self_attn.o_proj.bias": ("hidden",),
    "self_attn.sinks": ("heads",),
    "post_attention_layernorm.weight": ("hidden",),
    "mlp.router.weight": ("router", "hidden"),
    "mlp.router.bias": ("router",),
}

EXPERTS: Mapping[Format, Mapping[str, Axes]] = {
    "mxfp4": {
        "mlp.experts.gate_up_proj_blocks": ("experts", "gate_up", "hidden_groups", "group_bytes"),
        "mlp.experts.gate_up_proj_scales": ("experts", "gate_up", "hidden_groups"),
        "mlp.experts.gate_up_proj_bias": ("experts", "gate_up"),
        "mlp.experts.down_proj_blocks": ("experts", "hidden", "intermediate_groups", "group_bytes"),
        "mlp.experts.down_proj_scales": ("experts", "hidden", "intermediate_groups"),
        "mlp.experts.down_proj_bias": ("experts", "hidden"),
    },
    "bf16": {
        "mlp.experts.gate_up_proj": ("experts", "hidden", "gate_up"),
        "mlp.experts.gate_up_proj_bias": ("experts", "gate_up"),
        "mlp.experts.down_proj": ("experts", "intermediate", "hidden"),
        "mlp.experts.down_proj_bias": ("experts", "hidden"),
    },
    "quark": {
        "mlp.experts.{expert}.gate_up_proj.weight": ("gate_up", "hidden_bytes"),
        "mlp.experts.{expert}.gate_up_proj.weight_scale": ("gate_up", "hidden_groups"),
        "mlp.experts.{expert}.gate_up_proj.bias": ("gate_up",),
        "mlp.experts.{expert}.down_proj.weight": ("hidden", "intermediate_bytes"),
        "mlp.experts.{expert}.down_proj.weight_scale": ("hidden", "intermediate_groups"),
        "mlp.experts.{expert}.down_proj.bias": ("hidden",),
    },
}
"""Gate and up rows are interleaved in `gate_up`: row 2i is gate i, row 2i + 1 is up i."""

PACKED_AXES = frozenset({"group_bytes", "hidden_groups", "intermediate_groups", "hidden_bytes", "intermediate_bytes"})
"""A tensor with one of these contains MXFP4 bytes."""

TOLERATED = ("rotary_emb.inv_freq", "_scale", "_scale_inv", ".scale", ".zero_point")
"""Endings of names that a checkpoint may have beyond the tables: KV-cache and activation scales, cached RoPE."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What one tensor must look like; any of `options` is good. dtypes are safetensors' names."""

    options: tuple[tuple[tuple[int, ...], frozenset[str]], ...]

    def accepts(self, shape: tuple[int, ...], dtype: str) -> bool:
        return any(shape == s and dtype in d for s, d in self.options)

    def __str__(self) -> str:
        return " or ".join(f"{list(shape)} {'/'.join(sorted(dtypes))}" for shape, dtypes in self.options)


def detect_format(config: Config) -> Format | None:
    """The format named by `quantization_config` in config.json. None if this module does not list its tensors."""
    known: dict[str | None, Format] = {
        None: "bf16",
        "mxfp4": "mxfp4",
        spec.QUANTIZATION: "mxfp4",
        "quark": "quark",
    }
    return known.get(config.quantization)


def axis_sizes(model: spec.ModelSpec) -> dict[str, int]:
    """Length of every axis name used in the tables."""
    return {
        "vocabulary": model.vocabulary,
        "hidden": model.hidden,
        "query": model.query_heads * model.head_size,
        "key": model.kv_heads * model.head_size,
        "heads": model.query_heads,
        "router": model.experts,
        "experts": model.experts,
        "gate_up": 2 * model.intermediate,
        "intermediate": model.intermediate,
        "hidden_groups": model.hidden // spec.MXFP4_GROUP,
        "intermediate_groups": model.intermediate // spec.MXFP4_GROUP,
        "group_bytes": spec.MXFP4_GROUP // 2,
        "hidden_bytes": model.hidden // 2,
        "intermediate_bytes": model.intermediate // 2,
    }


def expected(config: Config, fmt: Format) -> dict[str, Expected]:
    """Every tensor that a checkpoint of this config and format must have, by its name on disk."""
    sizes = axis_sizes(config.sizes)

    def entry(name: str, axes: Axes) -> Expected:
        shape = tuple(sizes[axis] for axis in axes)
        dtypes = BYTES if PACKED_AXES.intersection(axes) else FLOATS
        return Expected(((shape, dtypes), *(_quark_options(name, shape, axes, sizes) if fmt == "quark" else ())))

    out = {name: entry(name, axes) for name, axes in DENSE.items()}
    for layer in range(config.sizes.layers):
        for name, axes in LAYER.items():
            out[f"model.layers.{layer}.{name}"] = entry(name, axes)
        for name, axes in EXPERTS[fmt].items():
            for expert in range(config.sizes.experts) if "{expert}" in name else (None,):
                out[f"model.layers.{layer}.{name.format(expert=expert)}"] = entry(name, axes)
    return out


def _quark_options(
    name: str, shape: tuple[int, ...], axes: Axes, sizes: Mapping[str, int]
) -> list[tuple[tuple[int, ...], frozenset[str]]]:
    """Quark may hold a linear layer, expert or not, in FP8 with a scale per tensor or per row."""
    if name.endswith("weight_scale"):
        return [((), FLOATS), ((1,), FLOATS), ((shape[0],), FLOATS), ((shape[0], 1), FLOATS)]
    if name.endswith("_proj.weight"):
        unpacked = tuple(sizes[axis.removesuffix("_bytes")] for axis in axes)
        return [(unpacked, FP8)]
    return []
