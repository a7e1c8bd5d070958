"""The quantisation config that vLLM builds for a gpt-oss MXFP4 checkpoint.

A subclass under upstream's own name: `RoutedExperts.weight_loader` tests the literal `gpt_oss_mxfp4`. Everything but
the experts is upstream's; `_make_moe_method` asks `choose` which experts run and answers with the method for them.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from vllm_gptoss import _vllm, announce, choose, device, spec
from vllm_gptoss.settings import Settings

BACKENDS = {"flashinfer_trtllm_mxfp8": "flashinfer_trtllm_afp8"}
"""Our names that differ from `--moe-backend`'s. vLLM's oracle knows the alias, its command line does not."""


class GptOssQuantConfig(GptOssMxfp4Config):
    """MXFP4 experts of gpt-oss, kernel chosen by `vllm_gptoss.choose`."""

    def _make_moe_method(self, moe: Any) -> Any:
        choice = _choose(moe)
        announce.note("experts", choice)
        if choice.value == "gptoss":
            from vllm_gptoss.quantization.method import GptOssExpertsMethod

            return GptOssExpertsMethod(moe)
        if choice.value == "dequantize":
            from vllm_gptoss.quantization.dequantize import DequantizedExpertsMethod

            return DequantizedExpertsMethod(moe)
        method = super()._make_moe_method(moe)
        # The table says what to expect; what vLLM's oracle took is what runs.
        announce.note("experts", f"{choice}, as vLLM's {method.mxfp4_backend.value}")
        return method


def _choose(moe: Any) -> choose.Choice[str]:
    """The experts for one layer's `FusedMoEConfig`; a wish for one of vLLM's backends is set on the config."""
    if moe.moe_backend != "auto":
        return choose.Choice("upstream", f"--moe-backend {moe.moe_backend} was asked for")
    config = _vllm.current_config()
    settings = Settings.load(config.additional_config)
    parallel = moe.moe_parallel_config
    shape = choose.Shape(
        tensor_parallel=parallel.tp_size,
        expert_parallel=parallel.use_ep,
        lora=moe.is_lora_enabled,
        micro_batches=config.parallel_config.use_ubatching,
    )
    model = spec.GPT_OSS_120B if moe.num_experts == spec.GPT_OSS_120B.experts else spec.GPT_OSS_20B
    choice = choose.experts(device.detect(), model, shape, settings.experts)
    if settings.experts not in ("auto", "upstream", "gptoss", "native", "dequantize"):
        moe.moe_backend = BACKENDS.get(choice.value, choice.value)
    return choice
