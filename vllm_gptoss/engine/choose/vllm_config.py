"""vLLM's configuration and what it built, as the plain facts that `choose` reads. Nothing is changed or touched."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_gptoss import _vllm
from vllm_gptoss.engine.choose import Deployment, KvCache, RankExperts
from vllm_gptoss.engine.spec import ModelSpec


def configuration(config: Any) -> Deployment:
    """The deployment of a `VllmConfig`, before the model is built."""
    parallel, speculative = config.parallel_config, config.speculative_config
    backend, transfer = config.attention_config.backend, config.kv_transfer_config
    graphs, piecewise_graphs = _vllm.graphs(config)
    return Deployment(
        model=ModelSpec.from_json(vars(config.model_config.hf_config), str(config.model_config.model)),
        device_type=config.device_config.device_type,
        dtype=_name(config.model_config.dtype),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        data_parallel=parallel.data_parallel_size,
        decode_context_parallel=parallel.decode_context_parallel_size,
        prefill_context_parallel=parallel.prefill_context_parallel_size,
        custom_all_reduce=not parallel.disable_custom_all_reduce,
        expert_parallel=parallel.enable_expert_parallel,
        sequence_parallel=parallel.use_sequence_parallel_moe and config.lora_config is None,
        micro_batches=parallel.use_ubatching,
        kv_cache_dtype=config.cache_config.cache_dtype,
        kv_connectors=() if transfer is None else connectors(vars(transfer)),
        lora=config.lora_config is not None,
        lora_on_attention=adapts_attention(config),
        drafts=None if speculative is None else speculative.method,
        draft_tokens=0 if speculative is None else config.num_speculative_tokens,
        piecewise_graphs=piecewise_graphs,
        compiled_whole=_vllm.compiles_outer_model(config),
        batch_invariant=_vllm.batch_invariant(),
        graphs=graphs,
        offloaded=_vllm.offloads_weights(config),
        moves_experts=parallel.enable_eplb or parallel.enable_elastic_ep,
        load_format=str(getattr(config.load_config.load_format, "value", config.load_config.load_format)),
        aiter=uses_aiter(),
        attention_backend=None if backend is None else str(getattr(backend, "name", backend)),
    )


def built_model(deployment: Deployment, model: Any) -> Deployment:
    """With what vLLM built of it: attention backends and projections of this rank's layers."""
    layers = [layer for layer in model.model.layers if hasattr(layer, "attn")]  # other stages' have no attention
    backends = [layer.attn.attn.attn_backend.get_name() for layer in layers]
    linears = [linear for layer in layers for linear in (layer.attn.qkv_proj, layer.attn.o_proj, layer.mlp.router)]
    return replace(
        deployment,
        built_attention=next((name for name in backends if name != "FLASH_ATTN"), backends[0] if backends else None),
        quantized_projections=not all(_is_plain(getattr(linear, "weight", None)) for linear in linears),
    )


def built_experts(deployment: Deployment, method: Any, layer: Any) -> Deployment:
    """With one layer's experts as loaded. method: the `GptOssMxfp4MoEMethod`; layer: its `RoutedExperts`."""
    from vllm_gptoss.engine.kernels import nvrtc

    count, hidden, packed = layer.w2_weight.shape
    scales = (layer.w13_weight_scale.data, layer.w2_weight_scale.data)
    return replace(
        deployment,
        built_experts=method.mxfp4_backend.value,
        monolithic=method.is_monolithic,
        weighs_input=layer.apply_router_weight_on_input,
        mps=nvrtc.shared_by_mps(layer.w13_weight.device.index or 0),
        expert_bias=method.moe.has_bias,
        rank_experts=RankExperts(count, hidden, 2 * packed),
        largest_scale=max(int(scale.max()) for scale in scales),
    )


def first_step(deployment: Deployment, places: Sequence[Any], auxiliary: Sequence[int]) -> Deployment:
    """Adds what is known at the first step. places: `layer_binding.Place` of this rank; auxiliary: layers of EAGLE3."""
    caches = (place.attention.kv_cache for place in places)
    kinds = dict.fromkeys(KvCache(tuple(cache.shape), _name(cache.dtype), cache.stride(-1)) for cache in caches)
    tensors = [place.tensors for place in places]
    scales = [scale for place in places for scale in place.scales or ()]
    owned = (each.experts is not None and each.experts.expert_map is None for each in tensors)
    return replace(
        deployment,
        caches=tuple(kinds),
        one_scale=all(scale.numel() == 1 and _name(scale.dtype) == "float32" for scale in scales),
        own_experts=all(owned),
        one_rotary_cache=len({each.cos_sin.data_ptr() for each in tensors}) <= 1,
        auxiliary_states=bool(auxiliary),
    )


def connectors(transfer: Mapping[str, Any]) -> tuple[str, ...]:
    """The KV connectors of a `kv_transfer_config`: MultiConnector's own where it puts several together."""
    name, extra = transfer.get("kv_connector"), transfer.get("kv_connector_extra_config")
    inner = extra.get("connectors") if isinstance(extra, Mapping) else None
    if name == "MultiConnector" and isinstance(inner, list):
        return tuple(found for each in inner if isinstance(each, Mapping) for found in connectors(each))
    return () if name is None else (str(name),)


ATTENTION = frozenset(("qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj"))
"""Attention's projections, as `--lora-target-modules` names them."""


def adapts_attention(config: Any) -> bool:
    """Whether a `VllmConfig` limits LoRA to attention, and captures graphs both with and without adapters."""
    modules = getattr(config.lora_config, "target_modules", None) or ()
    captures = bool(modules) and config.compilation_config.cudagraph_specialize_lora
    return bool(captures) and ATTENTION.issuperset(modules)


def uses_aiter(environ: Mapping[str, str] | None = None) -> bool:
    """Whether vLLM may take AITER's experts: both variables must be on; the second is on by default."""
    environ = os.environ if environ is None else environ
    both = (("VLLM_ROCM_USE_AITER", "0"), ("VLLM_ROCM_USE_AITER_MOE", "1"))
    return all(environ.get(name, default).lower() in ("true", "1") for name, default in both)


def _is_plain(weight: Any) -> bool:
    return weight is not None and _name(weight.dtype) == "bfloat16" and weight.dim() == 2


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
