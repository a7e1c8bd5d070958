"""vLLM functions that a worker calls while it loads and runs the model: step, group, layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def is_first_rank() -> bool:
    """Whether this worker is the first of its group; True without a group."""
    try:
        from vllm.distributed import get_world_group

        return bool(get_world_group().is_first_rank)
    except AssertionError:  # no group was initialised
        return True


def forward_context() -> Any:
    """The `ForwardContext` of the step that runs (attention metadata, slots, graph mode), or None outside one."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return get_forward_context() if is_forward_context_available() else None


def kv_connector() -> Any | None:
    """The KV connector that must be notified of each layer of the current step, or None."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group, is_v1_kv_transfer_group

    if not has_kv_transfer_group() or not is_v1_kv_transfer_group():
        return None
    connector = get_kv_transfer_group()
    return connector if connector.has_connector_metadata() else None


def has_adapter(linears: Any) -> bool:
    """Whether a request of the step about to run has a LoRA adapter, from where vLLM's LoRA kernels read it.

    linears: projections of a layer, of which at least one must be wrapped for LoRA. True where none is, or where the
    wrapper is unknown.
    """
    wrappers = (getattr(linear, "punica_wrapper", None) for linear in linears)
    found = next((wrapper for wrapper in wrappers if wrapper is not None), None)
    metadata = getattr(found, "token_mapping_meta", None)
    return metadata is None or not bool(metadata.no_lora_flag_cpu.all())


def without_adapters(linear: Any) -> Any:
    """The linear layer that a LoRA wrapper of vLLM's holds; the layer itself without a wrapper."""
    return getattr(linear, "base_layer", linear)


def in_piecewise_graph(context: Any) -> bool:
    """True where vLLM replays or captures graphs between attention layers: those belong to the compiled model."""
    from vllm.config import CUDAGraphMode

    return bool(context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE)


def longest_query(context: Any) -> int:
    """Most tokens of one request in a step, by all metadata of its attention but FlashInfer's (of a draft model)."""
    return max(getattr(each, "max_query_len", 0) for each in context.attn_metadata.values())


def tensor_parallel_rank() -> int:
    """This worker's rank in its tensor-parallel group."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def all_ranks(yes: bool) -> bool:
    """Whether `yes` is true on every tensor-parallel rank. A collective: all ranks must call it in one order."""
    import torch
    from vllm.distributed import get_tp_group, model_parallel_is_initialized

    if not model_parallel_is_initialized() or get_tp_group().world_size == 1:
        return yes
    said = torch.tensor([yes], dtype=torch.int32)
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
    return bool(said)


def gathered(item: Any) -> list[Any]:
    """`item` of each tensor-parallel rank, in their order. A collective: all ranks must call it in one order."""
    import torch
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, item, group=group.cpu_group)
    return found


def is_last_pipeline_rank() -> bool:
    """True in the worker that ends the pipeline."""
    from vllm.distributed import get_pp_group

    return bool(get_pp_group().is_last_rank)


def all_reduce(tensor: Any) -> Any:
    """Sum over the tensor-parallel group, with vLLM's all-reduce."""
    from vllm.distributed import tensor_model_parallel_all_reduce

    return tensor_model_parallel_all_reduce(tensor)


def flash_attention_version() -> int | None:
    """The FlashAttention that vLLM runs here, 2, 3 or 4; None where it has none."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    return get_flash_attn_version()


@contextmanager
def attention_backend(ours: Any) -> Iterator[None]:
    """Registers the class `ours` as vLLM's backend of its name, for the layers that vLLM builds meanwhile.

    vLLM caches the backend of a configuration, so both ends clear that cache: no other model gets the class. A class
    that another plugin has registered stays.
    """
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend = AttentionBackendEnum[ours.get_name()]
    if backend.is_overridden():
        yield
        return
    selector._cached_get_attn_backend.cache_clear()
    register_backend(backend, f"{ours.__module__}.{ours.__qualname__}")
    try:
        yield
    finally:
        backend.clear_override()
        selector._cached_get_attn_backend.cache_clear()


def replace_parameter(layer: Any, name: str, tensor: Any) -> None:
    """Puts `tensor` in the place of a parameter so that vLLM can still reload weights into the layer."""
    from vllm.model_executor.utils import replace_parameter

    replace_parameter(layer, name, tensor)


def set_attributes(target: Any, attributes: dict[str, Any]) -> None:
    """Makes a layer, or its method, refer to the objects again that vLLM had set there before a reload."""
    for name, value in attributes.items():
        setattr(target, name, value)


def weight_scale(precision: Any) -> Any:
    """The MXFP4 scales of a triton_kernels `PrecisionConfig`. The field was renamed between releases."""
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import weight_mx_scale

    return weight_mx_scale(precision)


def intermediate_tensors(tensors: dict[str, Any]) -> Any:
    """What a pipeline rank hands to the next one."""
    from vllm.sequence import IntermediateTensors

    return IntermediateTensors(tensors)
