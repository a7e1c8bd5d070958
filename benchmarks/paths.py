"""The kernels that a model's layers run, counted on a worker with `apply_model`."""

from __future__ import annotations

from typing import Any

from vllm_gptoss.engine.choose import bands


def paths(model: Any) -> dict[str, int]:
    """The number of layers that run our fused kernels, one launch for all, kernels for many tokens, and our experts."""
    few = getattr(model, "fused_path", None)
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    layers = [each for each in methods if getattr(each, "ours", None)]
    fused = len(few.places) if few else 0
    return {
        "fused_layers": fused,
        "one_launch": fused if few and few.one_token else 0,
        "many_tokens": fused if few and few.most > bands.FUSED_TOKENS else 0,
        "own_experts": len(layers),
    }
