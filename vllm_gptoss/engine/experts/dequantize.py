"""Experts dequantised to BF16 at load, for CPUs without AMX, where vLLM has no MXFP4 kernel.

The checkpoint is loaded as MXFP4 (the loader tests the method's `weight_dtype`), then each weight becomes BF16 and
vLLM's unquantised CPU experts take over. BF16 holds every MXFP4 value exactly: e2m1 has two significant bits.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

from vllm_gptoss._vllm import worker
from vllm_gptoss.engine.experts.mxfp4 import dequantize


class DequantizedExpertsMethod(UnquantizedFusedMoEMethod):
    """vLLM's unquantised experts over a checkpoint that was MXFP4 on disk."""

    weight_dtype = "gpt_oss_mxfp4"

    def create_weights(self, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
        """Registers upstream's MXFP4 parameters: `w13_weight` [E, 2I, C/2] u8 and so on."""
        GptOssMxfp4MoEMethod.create_weights(self, layer, num_experts, *args, **kwargs)  # type: ignore[arg-type]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replaces each MXFP4 parameter by BF16, one expert at a time, then sets upstream's kernel up."""
        for name in ("w13_weight", "w2_weight"):
            blocks, scales = getattr(layer, name), getattr(layer, f"{name}_scale")
            experts, rows, half = blocks.shape
            weight = torch.empty(experts, rows, 2 * half, dtype=torch.bfloat16, device=blocks.device)
            for expert in range(experts):
                weight[expert] = dequantize(blocks[expert], scales[expert])
            worker.replace_parameter(layer, name, weight)
            delattr(layer, f"{name}_scale")
        self.moe_kernel = None  # upstream packs weights for the CPU only when it makes the kernel; a reload packs again
        super().process_weights_after_loading(layer)
