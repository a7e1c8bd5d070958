"""The reference's layers as a whole model in memory: a checkpoint's logits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.model_config import ModelConfig
from benchmarks.reference import ReferenceLayer, block, layer_of, linear, read_tensors, rms_norm


@dataclass(frozen=True, slots=True)
class Model:
    """All weights, in one dtype. embedding, head: [vocabulary, C]; norm: [C]."""

    config: ModelConfig
    embedding: Tensor
    layers: tuple[ReferenceLayer, ...]
    norm: Tensor
    head: Tensor


def hidden_states(model: Model, tokens: Tensor) -> Tensor:
    """tokens: [T] int, one sequence from position 0; returns the normed last hidden states [T, C]."""
    x = model.embedding[tokens]
    for layer in model.layers:
        x = block(x, layer, model.config)
    return rms_norm(x, model.norm, model.config.rms_norm_eps)


def forward(model: Model, tokens: Tensor) -> Tensor:
    """tokens: [T] int; returns logits [T, vocabulary]."""
    return linear(hidden_states(model, tokens), model.head)


def load(directory: Path | str, dtype: torch.dtype = torch.float32) -> Model:
    """Read a checkpoint with OpenAI's key names, MXFP4 (`*_blocks`, `*_scales`) or BF16 (`gate_up_proj`).

    Errors: KeyError names a tensor that is not there; use `vllm_gptoss.engine.checkpoint` to check one properly.
    """
    directory = Path(directory)
    config = ModelConfig.from_json(json.loads((directory / "config.json").read_text()))
    tensors = read_tensors(directory)
    layers = tuple(layer_of(tensors, index, config, dtype) for index in range(config.sizes.layers))
    embedding = tensors["model.embed_tokens.weight"].to(dtype)
    head = tensors["lm_head.weight"].to(dtype)
    return Model(config, embedding, layers, tensors["model.norm.weight"].to(dtype), head)
