"""The functions of vLLM's Model Runner V2 (0.33, `vllm/v1/worker/gpu/`) that our model runner calls.

`engine/runner/` calls them with tensors at fixed addresses, so that a CUDA graph can replay their launches.
`compatibility.py` compares them with the tested release.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any


@functools.cache
def parts() -> Any:
    """The functions, classes and constants of a decode step."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu.buffer_utils import UvaBuffer
    from vllm.v1.worker.gpu.input_batch import (
        InputBatch,
        combine_sampled_and_draft_tokens,
        post_update,
        prepare_pos_seq_lens,
    )
    from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR, ActiveKVConnector
    from vllm.v1.worker.gpu.model_runner import ExecuteModelState
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

    return SimpleNamespace(
        FULL=CUDAGraphMode.FULL,
        ModelRunnerOutput=ModelRunnerOutput,
        UvaBuffer=UvaBuffer,
        InputBatch=InputBatch,
        combine_sampled_and_draft_tokens=combine_sampled_and_draft_tokens,
        post_update=post_update,
        prepare_pos_seq_lens=prepare_pos_seq_lens,
        NO_OP_KV_CONNECTOR=NO_OP_KV_CONNECTOR,
        ActiveKVConnector=ActiveKVConnector,
        ExecuteModelState=ExecuteModelState,
        DefaultModelState=DefaultModelState,
        Sampler=Sampler,
        EagleSpeculator=EagleSpeculator,
        FlashAttentionMetadataBuilder=FlashAttentionMetadataBuilder,
    )


@functools.cache
def said() -> Any:
    """The scheduler's output classes and the status of a running request; equal in 0.32."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    return SimpleNamespace(
        EngineCoreOutput=EngineCoreOutput, EngineCoreOutputs=EngineCoreOutputs, RUNNING=RequestStatus.RUNNING
    )


def marks_padding() -> bool:
    """Whether the runner keeps `is_padding` for the experts (`VLLM_MOE_SKIP_PADDING`)."""
    import vllm.envs as envs

    return bool(envs.VLLM_MOE_SKIP_PADDING)


def use_classes(architecture: str, worker: str, scheduler: str, wants: Any, sizes: Any) -> None:
    """Makes vLLM use these classes (qualified names) for models of `architecture`, unless the user named others.

    vLLM calls the entry of `MODELS_CONFIG_MAP` before the platform sets `worker_cls`. Our entry is a subclass of
    vLLM's. wants: whether a `VllmConfig` gets the classes; sizes: of its CUDA graphs, None for vLLM's. Idempotent.
    """
    from vllm.model_executor.models import config as module

    theirs = module.MODELS_CONFIG_MAP[architecture]
    if getattr(theirs, "worker", None) == worker:
        return

    class WithClasses(theirs):  # type: ignore[misc, valid-type]
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            wanted = wants(vllm_config)
            if wanted and (found := sizes(vllm_config)):
                vllm_config.compilation_config.cudagraph_capture_sizes = found  # vLLM's entry sets a maximum otherwise
            theirs.verify_and_update_config(vllm_config)
            parallel, scheduling = vllm_config.parallel_config, vllm_config.scheduler_config
            if not wanted:
                return
            if parallel.worker_cls == "auto":
                parallel.worker_cls = worker
            # vLLM decides later whether to schedule ahead: with these executors, unless it is disabled.
            ahead = parallel.distributed_executor_backend in (None, "uni", "mp")
            if ahead and scheduling.scheduler_cls is None and scheduling.async_scheduling is not False:
                scheduling.scheduler_cls = scheduler

    WithClasses.worker = worker
    module.MODELS_CONFIG_MAP[architecture] = WithClasses


def extend_worker(config: Any, extension: str) -> None:
    """Adds the methods of the class `extension` (qualified name) to the workers, unless the user added another's."""
    parallel = config.parallel_config
    if not parallel.worker_extension_cls:
        parallel.worker_extension_cls = extension


def suits(config: Any) -> bool:
    """Whether a `VllmConfig` is one that our worker and scheduler were made for: text, generated on one CUDA GPU or on
    those of one host that vLLM's multiprocess executor shards the model over."""
    from vllm.platforms import current_platform

    parallel = config.parallel_config
    shards = parallel.world_size == 1 or (
        parallel.distributed_executor_backend == "mp"
        and parallel.nnodes == 1
        and parallel.world_size == parallel.tensor_parallel_size
    )
    here = current_platform.is_cuda() and shards and parallel.data_parallel_size == 1
    return here and config.model_config.runner_type == "generate" and bool(config.use_v2_model_runner)


def has_default_graphs(config: Any) -> bool:
    """Whether the user left the CUDA graphs of a `VllmConfig` to vLLM, which then captures PIECEWISE and FULL ones."""
    from vllm.config.compilation import CUDAGraphMode

    graphs = config.compilation_config
    return (
        graphs.cudagraph_capture_sizes is None
        and graphs.max_cudagraph_capture_size is None
        and graphs.cudagraph_mode in (None, CUDAGraphMode.FULL_AND_PIECEWISE)
        and config.optimization_level >= 2  # below, vLLM captures no FULL graphs
        and config.performance_mode == "balanced"
        and not config.model_config.enforce_eager
    )


def gpu_architecture() -> str:
    """`sm90`, …, from the driver's management library; empty if unknown."""
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability()
    return f"sm{found.major}{found.minor}" if found else ""


def cache_groups(manager: Any) -> tuple[tuple[Any, int], ...] | None:
    """Each group's manager of a `KVCacheManager`, and how many keys its window has (0: all); None for other kinds.

    All blocks have the size by which prefixes are looked up: a partial block is never cached then.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

    groups = []
    for group in manager.coordinator.single_type_managers:
        if group.block_size != manager.block_pool.hash_block_size:
            return None
        if type(group) is FullAttentionManager:
            groups.append((group, 0))
        elif type(group) is SlidingWindowManager:
            groups.append((group, group.sliding_window + group.extra_retained_tokens))
        else:
            return None
    return tuple(groups)
