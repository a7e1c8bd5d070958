"""What is compiled while vLLM loads the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import bands, device
from vllm_gptoss.engine.experts import sm90
from vllm_gptoss.engine.experts.method import GptOssExpertsMethod
from vllm_gptoss.engine.kernels import cache, step


def loads(model: Any, deployment: choose.Deployment) -> Iterator[tuple[Any, ...]]:
    """The calls that load the kernels that compile longest, the experts' and one token's, for a model without weights.

    They equal later calls (`sm90.prepare`, `fused_path`, `one_token`), which then find the kernels loaded.
    """
    layer, sizes = model.model.layers[model.model.start_layer], deployment.model
    if not isinstance(layer.mlp.experts.routed_experts.quant_method, GptOssExpertsMethod):
        return
    index = layer.input_layernorm.weight.device.index or 0
    experts = sm90.of_sizes(deployment.experts_of_a_rank, sizes.active_experts, sizes.experts, index)
    if choose.one_token(device.detect(), deployment).value == bands.ONE_LAUNCH:
        yield step.compile_for, _shape(deployment, experts), index
    yield from sm90.kernels(experts)


def _shape(deployment: choose.Deployment, layer: sm90.LayerExperts) -> step.Shape:
    model, few = deployment.model, layer.few
    element = cache.E4M3 if deployment.kv_cache_dtype in cache.VLLM_E4M3 else cache.BF16
    scale_pairs = few.up.scales.shape[2] // 64, few.down.scales.shape[2] // 64
    return step.Shape(
        model.layers, model.hidden, model.query_heads, few.down.tiles * 64, few.up.experts, scale_pairs, element
    )
