"""The quantisation config that vLLM builds for a gpt-oss MXFP4 checkpoint.

A subclass under upstream's own name: `RoutedExperts.weight_loader` tests the literal `gpt_oss_mxfp4`. Everything but
the experts is upstream's; `_make_moe_method` calls `choose` to select the experts and returns their method.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from vllm_gptoss import _vllm, fallback, startup_line
from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import device
from vllm_gptoss.engine.choose import vllm_config as describe
from vllm_gptoss.settings import Settings

BACKENDS = {"flashinfer_trtllm_mxfp8": "flashinfer_trtllm_afp8"}
"""Our names that differ from `--moe-backend`'s. vLLM's oracle knows the alias, its command line does not."""

_MARLIN = ("vllm_gptoss.engine.experts.sm80", "MarlinExpertsMethod")
_HOPPER = ("vllm_gptoss.engine.experts.method", "GptOssExpertsMethod")
METHODS = {"Hopper": _HOPPER, "Ampere/Ada": _MARLIN, "Blackwell RTX": _MARLIN}
"""The class of `gptoss` for a GPU family."""

PLUGINS = ("gptoss", "native", "dequantize")
"""Values of `experts` that are no backend of vLLM's command line."""


class GptOssQuantConfig(GptOssMxfp4Config):
    """MXFP4 experts of gpt-oss, kernel chosen by `vllm_gptoss.engine.choose`."""

    def _make_moe_method(self, moe: Any) -> Any:
        wish = Settings.load(_vllm.current_config().additional_config).experts
        asked = moe.moe_backend, moe.is_lora_enabled
        own = fallback.attempt("experts", wish, lambda: _own_method(moe, wish))
        if own is not None and own[1] is not None:
            startup_line.note("experts", own[0])
            return own[1]
        if own is None:
            moe.moe_backend, moe.is_lora_enabled = asked
        elif wish not in ("auto", "upstream", *PLUGINS):
            moe.moe_backend = BACKENDS.get(wish, wish)
        method = super()._make_moe_method(moe)
        # The table has the expected backend; vLLM's oracle selects the actual one.
        startup_line.note("experts", f"{own[0] if own else 'upstream'}, as vLLM's {method.mxfp4_backend.value}")
        return method


def _own_method(moe: Any, wish: str) -> tuple[choose.Choice[str], Any]:
    """The choice for one layer's `FusedMoEConfig`, and our method for it; None where it is one of vLLM's."""
    deployment = replace(
        describe.configuration(_vllm.current_config()), moe_backend=moe.moe_backend, lora=moe.is_lora_enabled
    )
    choice = choose.experts(device.detect(), deployment, wish)
    if choice.value == "gptoss":
        module, name = METHODS[choose.family(device.detect()).name]
        return choice, getattr(importlib.import_module(module), name)(moe, deployment, wish)
    if choice.value == "dequantize":
        from vllm_gptoss.engine.experts.dequantize import DequantizedExpertsMethod

        return choice, DequantizedExpertsMethod(moe)
    return choice, None
