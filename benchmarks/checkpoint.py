"""A checkpoint of a gpt-oss shape with random weights in openai's format: arithmetic that is alive everywhere.

vLLM's dummy weights serve for timing only: their activations and logits are nearly constant. These keep every
activation near unit size through the layers, route unevenly, and give logits that differ.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from vllm_gptoss.cli.recipes.model_config import model_config
from vllm_gptoss.engine import spec

E2M1_RMS = math.sqrt(2 * sum(value**2 for value in (0.5, 1, 1.5, 2, 3, 4, 6)) / 16)


def write(model: spec.ModelSpec, directory: Path, seed: int = 0) -> None:
    """`config.json` and one safetensors file per layer into `directory`; the same seed gives the same bytes."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(_outside(model, generator), directory / "model-outside.safetensors", metadata={"format": "pt"})
    for layer in range(model.layers):
        tensors = {f"model.layers.{layer}.{name}": tensor for name, tensor in _layer(model, generator).items()}
        save_file(tensors, directory / f"model-layer-{layer:03}.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(model_config(model), indent=1) + "\n")


def _normal(generator: Any, *size: int, scale: float = 1.0) -> Any:
    import torch

    return (torch.randn(*size, generator=generator) * scale).bfloat16()


def _outside(model: spec.ModelSpec, generator: Any) -> dict[str, Any]:
    size = (model.vocabulary, model.hidden)
    return {
        "model.embed_tokens.weight": _normal(generator, *size),
        "model.norm.weight": 1 + _normal(generator, model.hidden, scale=0.1),
        "lm_head.weight": _normal(generator, *size, scale=2 * model.hidden**-0.5),
    }


def _layer(model: spec.ModelSpec, generator: Any) -> dict[str, Any]:
    hidden, head = model.hidden, model.head_size
    tensors = {
        "input_layernorm.weight": 1 + _normal(generator, hidden, scale=0.1),
        "post_attention_layernorm.weight": 1 + _normal(generator, hidden, scale=0.1),
        "self_attn.sinks": _normal(generator, model.query_heads),
        "mlp.router.weight": _normal(generator, model.experts, hidden, scale=hidden**-0.5),
        "mlp.router.bias": _normal(generator, model.experts, scale=0.5),
        "self_attn.o_proj.weight": _normal(
            generator, hidden, model.query_heads * head, scale=(model.query_heads * head) ** -0.5
        ),
        "self_attn.o_proj.bias": _normal(generator, hidden, scale=0.1),
    }
    for name, heads in (("q", model.query_heads), ("k", model.kv_heads), ("v", model.kv_heads)):
        tensors[f"self_attn.{name}_proj.weight"] = _normal(generator, heads * head, hidden, scale=hidden**-0.5)
        tensors[f"self_attn.{name}_proj.bias"] = _normal(generator, heads * head, scale=0.1)
    inner = model.intermediate
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        tensors |= {
            f"mlp.experts.{name}_{part}": tensor
            for part, tensor in _mxfp4(generator, model.experts, rows, columns).items()
        }
    return tensors


def _mxfp4(generator: Any, experts: int, rows: int, columns: int) -> dict[str, Any]:
    """Random codes, scales of two powers around columns^-0.5, bias."""
    import torch

    groups = columns // spec.MXFP4_GROUP
    code = 127 + round(math.log2(columns**-0.5 / E2M1_RMS))
    size = (experts, rows, groups)
    return {
        "blocks": torch.randint(0, 256, (*size, spec.MXFP4_GROUP // 2), dtype=torch.uint8, generator=generator),
        "scales": torch.randint(code - 1, code + 1, size, dtype=torch.uint8, generator=generator),
        "bias": _normal(generator, experts, rows, scale=0.1),
    }
