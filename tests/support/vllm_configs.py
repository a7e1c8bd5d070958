"""vLLM's own configuration objects around a model that is only named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CompilationConfig, DeviceConfig, KVTransferConfig, ParallelConfig, VllmConfig

SIZES = {
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201_088,
}
THREE_DRAFTS = SimpleNamespace(method="eagle3", num_speculative_tokens=3)
MODEL = SimpleNamespace(model="gpt-oss-20b", hf_config=SimpleNamespace(**SIZES), dtype=torch.bfloat16)


def config(**changes: Any) -> Any:
    """vLLM's real configuration around a model that is only named."""
    made = VllmConfig(device_config=DeviceConfig("cpu"))
    for name, value in {"model_config": MODEL, **changes}.items():
        setattr(made, name, value)
    return made


def parallel(**sizes: Any) -> Any:
    made = ParallelConfig()
    for name, value in sizes.items():
        setattr(made, name, value)
    return made


def compilation(**changes: Any) -> Any:
    made = CompilationConfig()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def transfer(name: str, *inner: str) -> KVTransferConfig:
    extra = {"connectors": [{"kv_connector": each, "kv_role": "kv_both"} for each in inner]}
    return KVTransferConfig(
        kv_connector=name, engine_id="a", kv_role="kv_both", kv_connector_extra_config=extra if inner else {}
    )
