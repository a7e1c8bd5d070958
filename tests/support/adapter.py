"""A LoRA adapter of attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write(directory: Path, shape: Any) -> Path:
    """A random adapter of rank 4 on the attention projections of a `ModelSpec`, in PEFT's format."""
    rng = torch.Generator().manual_seed(3)
    query, key = shape.query_heads * shape.head_size, shape.kv_heads * shape.head_size
    sizes = {"q_proj": (shape.hidden, query), "k_proj": (shape.hidden, key), "v_proj": (shape.hidden, key)}
    sizes["o_proj"] = (query, shape.hidden)
    tensors = {}
    for layer in range(shape.layers):
        for name, (columns, rows) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = (torch.randn(4, columns, generator=rng) * 0.2).bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = (torch.randn(rows, 4, generator=rng) * 0.2).bfloat16()
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(sizes), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
