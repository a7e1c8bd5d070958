"""Frozen facts of gpt-oss, and the letters that name its axes.

Sources: openai/gpt-oss-20b and -120b `config.json`, "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv:2508.10925),
openai/gpt-oss `gpt_oss/torch/model.py`, OCP Microscaling Formats (MX) v1.0 for MXFP4.

Axis letters, used in every docstring: T tokens, H query heads, K key/value heads, D head size, E experts,
A active experts per token, N output rows, C input columns, G groups of 32 along C.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURE = "GptOssForCausalLM"
MODEL_TYPE = "gpt_oss"
QUANTIZATION = "gpt_oss_mxfp4"

WINDOW = 128
"""Keys that a sliding-window layer sees, the current one included. Layers 0, 2, 4, … are windowed."""

SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0
"""The gate is clamped to (-inf, 7], the up half to [-7, 7]; gate and up rows are interleaved in the checkpoint."""

RMS_NORM_EPS = 1e-5

MXFP4_GROUP = 32
"""Values along C that share one e8m0 scale; 16 bytes of packed e2m1, low nibble first."""

ROPE_THETA = 150_000.0
ROPE_SCALING_FACTOR = 32.0
ROPE_BETA_FAST = 32.0
ROPE_BETA_SLOW = 1.0
ROPE_ORIGINAL_CONTEXT = 4096
MAX_POSITIONS = 131_072


SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_local_experts", "num_experts_per_tok"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
)
"""The names in config.json of the sizes below, in this order."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of one gpt-oss model."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    experts: int
    active_experts: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocabulary: int

    @classmethod
    def from_json(cls, config: Mapping[str, Any], name: str = "") -> ModelSpec:
        """config: a parsed config.json.

        Raises:
            KeyError: with the name of a size that is missing.
        """
        return cls(name, *(config[size] for size in SIZES))

    @property
    def weight_gib(self) -> float:
        """The checkpoint's size in GiB: MXFP4 experts (4.25 bits a value), the rest in BF16."""
        expert_values = self.layers * self.experts * 3 * self.hidden * self.intermediate
        attention = self.layers * self.hidden * self.head_size * 2 * (self.query_heads + self.kv_heads)
        embeddings = 2 * self.vocabulary * self.hidden
        return (expert_values * (4 + 8 / MXFP4_GROUP) / 8 + 2 * (attention + embeddings)) / 2**30


GPT_OSS_20B = ModelSpec("gpt-oss-20b", 24, 2880, 2880, 32, 4, 64, 8, 64, 201_088)
GPT_OSS_120B = ModelSpec("gpt-oss-120b", 36, 2880, 2880, 128, 4, 64, 8, 64, 201_088)
