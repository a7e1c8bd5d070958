"""`config.json` of a gpt-oss shape."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm_gptoss.engine import spec


def model_config(model: spec.ModelSpec) -> dict[str, Any]:
    """`config.json` of a gpt-oss shape."""
    return {
        "architectures": [spec.ARCHITECTURE],
        "model_type": spec.MODEL_TYPE,
        **dict(zip(spec.SIZES, dataclasses.astuple(model)[1:], strict=True)),
        "sliding_window": spec.WINDOW,
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(model.layers)],
        "max_position_embeddings": spec.MAX_POSITIONS,
        "initial_context_length": spec.ROPE_ORIGINAL_CONTEXT,
        "rms_norm_eps": spec.RMS_NORM_EPS,
        "rope_theta": spec.ROPE_THETA,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": spec.ROPE_SCALING_FACTOR,
            "beta_fast": spec.ROPE_BETA_FAST,
            "beta_slow": spec.ROPE_BETA_SLOW,
            "original_max_position_embeddings": spec.ROPE_ORIGINAL_CONTEXT,
            "truncate": False,
        },
        "swiglu_limit": spec.SWIGLU_LIMIT,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }
