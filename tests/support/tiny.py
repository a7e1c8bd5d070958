"""Write a small random gpt-oss in the exact on-disk formats: OpenAI's MXFP4, BF16, and Quark's one tensor per expert.

The weights are random but not tame: sinks, biases and router are large enough that dropping any of them shows in
the logits. Same seed, same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import reference
from tests.support import mxfp4

Format = Literal["mxfp4", "bf16", "quark"]


@dataclass(frozen=True)
class Shape:
    """Sizes of the random model. The defaults load in vLLM for CPU (head size 64, multiples of 32) in seconds."""

    layers: int = 2
    hidden: int = 64
    intermediate: int = 64
    experts: int = 4
    active_experts: int = 2
    query_heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    vocabulary: int = 512
    window: int = 128
    max_positions: int = 4096


def config(shape: Shape, fmt: Format = "mxfp4") -> dict[str, Any]:
    """config.json with the keys and spelling of openai/gpt-oss-20b's."""
    kinds = ["sliding_attention", "full_attention"]
    out: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": shape.vocabulary - 1,
        "experts_per_token": shape.active_experts,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "layer_types": [kinds[i % 2] for i in range(shape.layers)],
        "max_position_embeddings": shape.max_positions,
        "model_type": "gpt_oss",
        "num_attention_heads": shape.query_heads,
        "num_experts_per_tok": shape.active_experts,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "num_local_experts": shape.experts,
        "output_router_logits": False,
        "pad_token_id": shape.vocabulary - 2,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": shape.window,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    if fmt == "mxfp4":
        out["quantization_config"] = {"modules_to_not_convert": skipped, "quant_method": "mxfp4"}
    elif fmt == "quark":
        parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.router")
        layers = [f"model.layers.{index}.{part}" for index in range(shape.layers) for part in parts]
        out["quantization_config"] = quark_config([*layers, "lm_head"])
    return out


def quark_config(excluded: list[str]) -> dict[str, Any]:
    """quantization_config as Quark writes it for experts with MXFP4 weights and BF16 activations."""
    weight = {
        "dtype": "fp4",
        "group_size": 32,
        "is_dynamic": False,
        "observer_cls": "PerBlockMXObserver",
        "qscheme": "per_group",
        "scale_format": "e8m0",
        "symmetric": None,
        "ch_axis": -1,
    }
    layer = {"bias": None, "input_tensors": None, "output_tensors": None, "weight": weight}
    return {
        "quant_method": "quark",
        "exclude": excluded,
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "global_quant_config": layer,
        "kv_cache_quant_config": {},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "quant_mode": "eager_mode",
    }


def tensors(shape: Shape, fmt: Format = "mxfp4", seed: int = 0) -> dict[str, Tensor]:
    """All tensors of the checkpoint, named as on disk. Every format holds the same, MXFP4-representable, experts."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float) -> Tensor:
        return (torch.randn(*size, generator=rng) * std).to(torch.bfloat16)

    h, i, e = shape.hidden, shape.intermediate, shape.experts
    out = {
        "model.embed_tokens.weight": normal(shape.vocabulary, h, std=1.0),
        "model.norm.weight": 1 + normal(h, std=0.2),
        "lm_head.weight": normal(shape.vocabulary, h, std=h**-0.5),
    }
    sizes = {"q": shape.query_heads, "k": shape.kv_heads, "v": shape.kv_heads}
    for index in range(shape.layers):
        prefix = f"model.layers.{index}."
        for name, heads in sizes.items():
            rows = heads * shape.head_size
            out[f"{prefix}self_attn.{name}_proj.weight"] = normal(rows, h, std=1.5 * h**-0.5)
            out[f"{prefix}self_attn.{name}_proj.bias"] = normal(rows, std=0.5)
        columns = shape.query_heads * shape.head_size
        out[f"{prefix}self_attn.o_proj.weight"] = normal(h, columns, std=columns**-0.5)
        out[f"{prefix}self_attn.o_proj.bias"] = normal(h, std=0.2)
        out[f"{prefix}self_attn.sinks"] = normal(shape.query_heads, std=2.0)
        out[f"{prefix}input_layernorm.weight"] = 1 + normal(h, std=0.2)
        out[f"{prefix}post_attention_layernorm.weight"] = 1 + normal(h, std=0.2)
        out[f"{prefix}mlp.router.weight"] = normal(e, h, std=2 * h**-0.5)
        out[f"{prefix}mlp.router.bias"] = normal(e, std=0.5)
        experts = f"{prefix}mlp.experts."
        for name, rows, columns in (("gate_up_proj", 2 * i, h), ("down_proj", h, i)):
            weight = torch.randn(e, rows, columns, generator=rng) * columns**-0.5
            bias = normal(e, rows, std=0.3)
            out |= expert_tensors(experts, name, weight, bias, fmt)
    return out


def expert_tensors(prefix: str, name: str, weight: Tensor, bias: Tensor, fmt: Format) -> dict[str, Tensor]:
    """One projection of a layer's experts. weight: [E, N, C]; bias: [E, N]."""
    blocks, scales = mxfp4.quantise(weight)
    if fmt == "mxfp4":
        return {f"{prefix}{name}_blocks": blocks, f"{prefix}{name}_scales": scales, f"{prefix}{name}_bias": bias}
    if fmt == "bf16":
        exact = reference.mxfp4_dequantise(blocks, scales, torch.bfloat16)
        return {f"{prefix}{name}": exact.mT.contiguous(), f"{prefix}{name}_bias": bias}
    out = {}
    for expert in range(weight.shape[0]):
        out[f"{prefix}{expert}.{name}.weight"] = blocks[expert].flatten(-2).contiguous()
        out[f"{prefix}{expert}.{name}.weight_scale"] = scales[expert].contiguous()
        out[f"{prefix}{expert}.{name}.bias"] = bias[expert].contiguous()
    return out


def write(
    directory: Path, shape: Shape | None = None, fmt: Format = "mxfp4", *, seed: int = 0, shards: int = 1, **sizes: int
) -> Path:
    """Write config.json and the weights, in `shards` files with an index if more than one. Returns the directory.

    sizes: fields of `Shape` to change.
    """
    shape = replace(shape or Shape(), **sizes)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(shape, fmt), indent=2))
    write_tensors(directory, tensors(shape, fmt, seed), shards)
    return directory


def write_tensors(directory: Path, weights: Mapping[str, Tensor], shards: int = 1) -> None:
    """Write `model.safetensors`, or `model-0000i-of-0000n.safetensors` and their index."""
    if shards == 1:
        save_file(dict(weights), directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(t.numel() * t.element_size() for t in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
