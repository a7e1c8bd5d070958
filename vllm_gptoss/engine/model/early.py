"""Compiles kernels while vLLM loads the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import bands, device
from vllm_gptoss.engine.experts import sm90
from vllm_gptoss.engine.experts.method import GptOssExpertsMethod
from vllm_gptoss.engine.kernels import cache, nvrtc, step


def start(model: Any, deployment: choose.Deployment) -> None:
    """Starts to compile what a built model will need, if the plugin's kernels run its experts."""
    layer = model.model.layers[model.model.start_layer]
    if isinstance(layer.mlp.experts.routed_experts.quant_method, GptOssExpertsMethod):
        nvrtc.in_background(loads(deployment, torch.cuda.current_device()))


def loads(deployment: choose.Deployment, index: int) -> Iterator[tuple[Any, ...]]:
    """The calls that compile and load, on GPU `index`, the kernels that compile longest: the experts' and one token's.

    They equal later calls (`sm90.prepare`, `fused_path`, `one_token`), which then find the kernels loaded.
    """
    model = deployment.model
    layer = sm90.of_sizes(deployment.experts_of_a_rank, model.active_experts, model.experts, index)
    if choose.one_token(device.detect(), deployment).value == bands.ONE_LAUNCH:
        yield step.compile_for, _shape(deployment, layer), index
    yield from sm90.kernels(layer)


def _shape(deployment: choose.Deployment, layer: sm90.LayerExperts) -> step.Shape:
    model, few = deployment.model, layer.few
    element = cache.E4M3 if deployment.kv_cache_dtype in cache.VLLM_E4M3 else cache.BF16
    scale_pairs = few.up.scales.shape[2] // 64, few.down.scales.shape[2] // 64
    return step.Shape(
        model.layers, model.hidden, model.query_heads, few.down.tiles * 64, few.up.experts, scale_pairs, element
    )
