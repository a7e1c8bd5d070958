"""The one owner of the addresses that the fused layers' kernels read.

Kernels and captured CUDA graphs read weights by address. Every operation of vLLM that this path allows keeps a weight
at its address:

| operation | why the address stays |
|---|---|
| reload, weight updates from a trainer | vLLM copies into its parameters; `engine/experts/laid_out.py` for the experts
| | sleep and wake, both levels | vLLM's allocator maps new memory at the old virtual addresses |
| sharded state, tensorizer, dummy weights | they load before the first step |

LoRA wraps the linear layers after they are built, and `look_up` reads the wrapped ones. `choose` refuses the operations
that move weights: offloading, load balancing of experts, elastic expert parallelism. Any other movement is found by
`moved` before the next launch that no graph replays. Memory that must hold a value between launches is registered as a
buffer (`keep_scratch`), which vLLM saves and restores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from vllm_gptoss._vllm import worker
from vllm_gptoss.engine.kernels import cache, dense, scratch
from vllm_gptoss.engine.kernels.layer import LayerTensors
from vllm_gptoss.engine.model.layer_binding import Place

if TYPE_CHECKING:
    from vllm_gptoss.engine.experts.sm90 import LayerExperts


def moved(places: Sequence[Place]) -> str | None:
    """Describes a weight that is not where `look_up` found it; None where none has moved.

    Takes some 0.1 µs a weight: 40 to 60 µs for gpt-oss-120b, in steps that no graph replays.
    """
    for place in places:
        for module, name, address in place.weights:
            found = _found(module, name)
            if found is None or found.data_ptr() != address:
                return f"{name} of {getattr(module, 'prefix', type(module).__name__)} has moved in memory"
        if place.layer is not None and own_experts(place.layer) is not place.experts:
            return f"the expert kernels of {place.name} have changed"
    return None


def _found(module: nn.Module, name: str) -> Any:
    """The parameter or buffer of that name, or None."""
    return module._parameters.get(name, module._buffers.get(name))


def _parameters(layer: Any) -> Iterator[tuple[nn.Module, str]]:
    """The modules and names of the parameters and buffers that `look_up` reads."""
    attention, router = layer.attn, layer.mlp.router
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        yield norm, "weight"
    yield attention, "sinks"
    for linear in (*map(worker.without_adapters, (attention.qkv_proj, attention.o_proj)), router):
        yield from ((linear, "weight"), (linear, "bias"))
    if attention.attn.kv_cache_dtype in cache.VLLM_E4M3:
        yield from ((attention.attn, "_k_scale"), (attention.attn, "_v_scale"))


def look_up(layer: Any, tensor_parallel_rank: int) -> Place:
    """What the kernels need of one of vLLM's layers."""
    block, router, runner = layer.attn, layer.mlp.router, layer.mlp.experts
    qkv_proj, o_proj = worker.without_adapters(block.qkv_proj), worker.without_adapters(block.o_proj)
    own = own_experts(layer)
    tensors = LayerTensors(
        norm=layer.input_layernorm.weight.data,
        qkv_weight=qkv_proj.weight.data,
        qkv_bias=qkv_proj.bias.data,
        # vLLM may replace the module's buffer by a bf16 copy; captured graphs keep the address of this one.
        cos_sin=block.rotary_emb.cos_sin_cache,
        sinks=block.sinks.data,
        window=block.attn.sliding_window or 0,
        out_weight=o_proj.weight.data,
        out_bias=o_proj.bias.data if tensor_parallel_rank == 0 else None,  # one rank adds it, the all-reduce spreads it
        post_norm=layer.post_attention_layernorm.weight.data,
        router_weight=router.weight.data,
        router_bias=router.bias.data,
        active=runner.moe_config.experts_per_token,
        experts=own.few if own is not None else None,
    )
    weights = tuple((module, name, _found(module, name).data_ptr()) for module, name in _parameters(layer))
    scales = (block.attn._k_scale, block.attn._v_scale) if block.attn.kv_cache_dtype in cache.VLLM_E4M3 else None
    return Place(block.attn.layer_name, tensors, block.attn, runner, own, weights, layer, scales)


def own_experts(layer: Any) -> LayerExperts | None:
    """The kernels of a layer that `GptOssExpertsMethod` prepared for these activations, or None."""
    from vllm_gptoss.engine.experts import method

    own = method.own(layer.mlp.experts.routed_experts.quant_method)
    hidden = layer.input_layernorm.weight.shape[0]
    return own if own is not None and own.few.up.tiles * dense.BLOCK == hidden else None


def keep_scratch(model: nn.Module, places: Sequence[Place] = ()) -> None:
    """Registers what kernels keep between launches, and the cosines that they read, as buffers of `model`."""
    cosines = {place.tensors.cos_sin.data_ptr(): place.tensors.cos_sin for place in places}
    named = {f"gptoss_cos_sin_{at}": tensor for at, tensor in enumerate(cosines.values())}
    for name, tensor in (scratch.kept() | named).items():
        model.register_buffer(name, tensor, persistent=False)
