"""Decode steps of 17 to 512 tokens: `layer_upto512` over the tensors of `layer_binding`.

`FusedPath` runs it for steps with one token of each request, or several of drafts (`choose.tokens_per_request`). Other
steps of that size run vLLM's compiled model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_gptoss import _vllm
from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import bands, device
from vllm_gptoss.engine.kernels import attention_many, cache, norm_rope_router, nvrtc, product_many
from vllm_gptoss.engine.model import layer_upto16, layer_upto512
from vllm_gptoss.engine.model.layer_binding import Place


def most(deployment: choose.Deployment, wish: str) -> int:
    """Tokens of the largest step that this path may run, as known before the first step. wish: of the layers."""
    return bands.FUSED_TOKENS if obstacle(deployment, wish) else bands.MANY_TOKENS


def prepared(places: Sequence[Place], deployment: choose.Deployment, wish: str) -> int:
    """As `most`, called once layers and cache exist. Compiles all kernels. Logs one line if vLLM keeps these steps."""
    why = obstacle(deployment, wish) or obstacle_at_hand(places)
    if why is None:
        return bands.MANY_TOKENS
    few = bands.FUSED_TOKENS
    say = _vllm.init_logger("vllm.gptoss").info
    say("layers: upstream for decode steps of more than %d tokens (%s)", few, why)
    return few


def obstacle(deployment: choose.Deployment, wish: str) -> str | None:
    """The reason why vLLM runs these steps, or None."""
    choice = choose.many_tokens(device.detect(), deployment, wish)
    return None if choice.value == bands.AROUND_CUBLAS else choice.reason


def obstacle_at_hand(places: Sequence[Place]) -> str | None:
    """Why the kernels cannot run on these layers, or None: all are compiled then."""
    if not all(place.experts is not None and place.experts.many is not None for place in places):
        return "no kernels of the plugin for the experts of many tokens"
    try:
        nvrtc.at_once(load for place in places for load in loads(place))
    except nvrtc.NvrtcError as error:
        return f"a kernel cannot be compiled: {error}"
    return None


def loads(place: Place) -> Iterator[tuple[Any, ...]]:
    """The calls that load the kernels of a layer; many are alike."""
    tensors = place.tensors
    index, (experts, hidden) = tensors.qkv_weight.device.index or 0, tensors.router_weight.shape
    element = cache.element(place.cache)
    yield norm_rope_router.norm_kernel, index, hidden
    yield norm_rope_router.rope_kernel, index, element
    yield norm_rope_router.route_kernel, index, norm_rope_router.plan(hidden, experts, tensors.active)
    yield attention_many.load, index, place.attention.num_kv_heads, tensors.window, element
    yield from product_many.loads(tensors.qkv_weight, tensors.out_weight, element)
    assert place.experts is not None
    yield from place.experts.loads(torch.int32, bands.MANY_TOKENS)


def layer(
    place: Place,
    x: Tensor,
    residual: Tensor | None,
    positions: Tensor,
    context: Any,
    reduce: layer_upto16.Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """One block. x: [T, C] bf16 is added to residual [T, C] bf16; returns the experts' output and that sum."""
    assert place.experts is not None
    experts = place.experts.kernel(x.shape[0])
    assert experts is not None
    requests = place.requests(context)
    return layer_upto512.layer(place.tensors, experts, place.cache, requests, positions, x, residual, reduce)
