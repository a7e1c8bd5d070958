"""The constants of a gpt-oss `config.json` that `reference.py` computes with. Needs neither torch nor transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_gptoss.engine import spec


@dataclass(frozen=True, slots=True)
class Yarn:
    """How positions become angles (arXiv:2309.00071 §3.3-3.4).

    `truncate` rounds the ramp's ends to whole dimensions; gpt-oss was trained without (its config.json).
    """

    theta: float = spec.ROPE_THETA
    factor: float = spec.ROPE_SCALING_FACTOR
    beta_fast: float = spec.ROPE_BETA_FAST
    beta_slow: float = spec.ROPE_BETA_SLOW
    original_context: int = spec.ROPE_ORIGINAL_CONTEXT
    truncate: bool = False

    @property
    def concentration(self) -> float:
        """Factor on cos and sin, so its square is on q·k: 0.1 ln(factor) + 1."""
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0

    def ramp(self, head_size: int) -> tuple[float, float]:
        """Range of rotated pair indices over which the frequency changes from original to slowed."""
        low, high = (
            self._pair_turning(self.beta_fast, head_size),
            self._pair_turning(self.beta_slow, head_size),
        )
        if self.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        return max(low, 0.0), min(high, head_size - 1.0)

    def _pair_turning(self, turns: float, head_size: int) -> float:
        """Fractional index of the pair that turns `turns` times within the original context."""
        return head_size / 2 * math.log(self.original_context / (turns * 2 * math.pi)) / math.log(self.theta)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of one checkpoint. `windows`: per layer, keys seen or None for all."""

    sizes: spec.ModelSpec
    windows: tuple[int | None, ...]
    swiglu_limit: float
    rms_norm_eps: float
    yarn: Yarn

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> ModelConfig:
        """config: the parsed config.json, with `rope_scaling` or transformers 5's `rope_parameters`."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        sizes = spec.ModelSpec.from_json(config)
        kinds = config.get("layer_types") or ["sliding_attention", "full_attention"] * sizes.layers
        window = config.get("sliding_window") or spec.WINDOW
        return cls(
            sizes=sizes,
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds[: sizes.layers]),
            swiglu_limit=config.get("swiglu_limit", spec.SWIGLU_LIMIT),
            rms_norm_eps=config.get("rms_norm_eps", spec.RMS_NORM_EPS),
            yarn=Yarn(
                theta=rope.get("rope_theta") or config.get("rope_theta", spec.ROPE_THETA),
                factor=rope.get("factor", spec.ROPE_SCALING_FACTOR),
                beta_fast=rope.get("beta_fast", spec.ROPE_BETA_FAST),
                beta_slow=rope.get("beta_slow", spec.ROPE_BETA_SLOW),
                original_context=rope.get("original_max_position_embeddings", spec.ROPE_ORIGINAL_CONTEXT),
                truncate=rope.get("truncate", True),
            ),
        )
