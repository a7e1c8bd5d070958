"""The part of a gpt-oss `config.json` that determines its tensors. Needs neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_gptoss.engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of one checkpoint, and its `quant_method`."""

    sizes: ModelSpec
    quantization: str | None

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> Config:
        """config: the parsed config.json.

        Raises:
            KeyError: with the name of a size that is missing.
        """
        return cls(ModelSpec.from_json(config), (config.get("quantization_config") or {}).get("quant_method"))
