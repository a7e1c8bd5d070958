"""gpt-oss shapes as `config.json`, and the bytes that one decode step of them must read."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm_gptoss.engine import spec

BANDWIDTHS = {"H200": 4.3e12, "H100": 3.05e12}
"""Bytes per second that one GPU reads (measured: H200 copy 4.21, read-only reduction 4.39 TB/s; H100 3.05)."""

TINY = spec.ModelSpec("tiny", 2, 128, 128, 8, 4, 16, 2, 64, 201_088)
"""For trying the benchmark itself where there is no GPU."""

SPECS = {"20b": spec.GPT_OSS_20B, "120b": spec.GPT_OSS_120B, "tiny": TINY}


def shape(name: str) -> spec.ModelSpec:
    """The shape called `name`; `20b:2` is two layers of the 20b.

    Raises:
        ValueError: there is no such shape.
    """
    base, _, layers = name.partition(":")
    if base not in SPECS or (layers and not layers.isdigit()):
        raise ValueError(f"no shape {name!r}; there are {', '.join(SPECS)}, and 20b:2 for two layers of one")
    return dataclasses.replace(SPECS[base], layers=int(layers)) if layers else SPECS[base]


def draft_config(model: spec.ModelSpec) -> dict[str, Any]:
    """`config.json` of an EAGLE3 draft for `model`, as the published drafts have it: one Llama layer, same width.

    Raises:
        ValueError: fewer than six layers: vLLM gives the draft the states of layers 2, N / 2 and N - 3.
    """
    if model.layers < 6:
        raise ValueError(f"an EAGLE3 draft reads three layers of the model: six at least, not {model.layers}")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": model.hidden,
        "intermediate_size": 6 * model.hidden,
        "num_attention_heads": model.query_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "vocab_size": model.vocabulary,
        "draft_vocab_size": model.vocabulary,
        "max_position_embeddings": spec.MAX_POSITIONS,
        "rms_norm_eps": spec.RMS_NORM_EPS,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def bandwidth(gpu: str) -> float | None:
    """Bytes per second that `gpu` reads, as `BANDWIDTHS` has it; None where it was not measured."""
    return next((found for name, found in BANDWIDTHS.items() if name in gpu), None)


def read_bytes(
    model: spec.ModelSpec, batch: int, context: int, tensor_parallel: int = 1, skew: bool = False, verified: int = 1
) -> float:
    """Bytes that a decode step must read once, of each GPU; over `bandwidth` it is the memory floor of a step.

    Experts that `batch` x `verified` tokens hit under uniform routing, attention, router and head weights, and the keys
    and values of `context` tokens (128 in window layers). A draft model is not counted.
    """
    missed = (1 - model.active_experts / model.experts) ** (batch * verified)
    hit = model.active_experts if skew else model.experts * (1 - missed)
    expert = 3 * model.hidden * model.intermediate * (4 + 8 / spec.MXFP4_GROUP) / 8
    attention = 2 * model.hidden * model.head_size * 2 * (model.query_heads + model.kv_heads)
    router = 2 * model.hidden * model.experts
    key_value = 2 * 2 * model.kv_heads * model.head_size * (min(context, spec.WINDOW) + context) / 2 * batch
    layer = (hit * expert + attention + key_value) / tensor_parallel + router
    return model.layers * layer + 2 * model.vocabulary * model.hidden / tensor_parallel
