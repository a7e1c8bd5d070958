"""All conditions on the device and the deployment under which a candidate cannot run.

A condition returns the reason or None. The limits of a kernel's shape are in its host file, as functions of plain
integers (`unsupported`) that are called here.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_gptoss.engine.choose.deployment import Deployment, KvCache
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.choose.measured import Measured
from vllm_gptoss.engine.kernels import (
    attention,
    attention_many,
    cache,
    dense,
    experts_marlin,
    experts_plan,
    norm_rope_router,
    nvrtc,
    step,
)
from vllm_gptoss.engine.spec import WINDOW

Condition = Callable[[Device, Deployment], str | None]


def when(found: Callable[[Deployment], object], reason: str) -> Condition:
    """A condition on the deployment alone. reason: may name its fields, as `{d.dtype}`."""

    def condition(device: Device, deployment: Deployment) -> str | None:
        return reason.format(d=deployment) if found(deployment) else None

    return condition


def needs(feature: str) -> Condition:
    """A condition on a feature of the device."""
    return lambda device, deployment: None if feature in device.features else f"needs {feature}"


def sm90(device: Device, deployment: Deployment) -> str | None:
    """The kernels of `engine/kernels/cuda` and their GPU."""
    if device.vendor != "nvidia" or deployment.device_type != "cuda":
        return "the kernels are CUDA kernels"
    return None if device.arch == "sm90" else f"the kernels are made for sm_90, this GPU is sm_{device.arch[2:]}"


# The layers


def projections(device: Device, deployment: Deployment) -> str | None:
    """Shapes of one rank's projections, as `QKVParallelLinear` and `RowParallelLinear` cut them."""
    model, (heads, kv_heads) = deployment.model, deployment.heads
    size = model.head_size
    why: str | None = (
        attention.unsupported(heads, kv_heads, size, attention.LEAST_BLOCK)
        or dense.unsupported(dense.Mode.QKV, (heads + 2 * kv_heads) * size, model.hidden)
        or dense.unsupported(dense.Mode.OUT, model.hidden, heads * size)
        or dense.unsupported(dense.Mode.ROUTER, model.experts, model.hidden, model.active_experts)
    )
    return why


def paged_cache(device: Device, deployment: Deployment) -> str | None:
    """The caches that vLLM made, once they are there: [blocks, K, block size, K's and V's 64]."""
    return next(filter(None, (_unread(found, deployment) for found in deployment.caches)), None)


def _unread(found: KvCache, deployment: Deployment) -> str | None:
    heads, kv_heads = deployment.heads
    if len(found.shape) != 4 or found.shape[1] != kv_heads or found.shape[3] != 2 * attention.HEAD:
        return f"the KV cache has shape {list(found.shape)}, not [blocks, heads, block size, {2 * attention.HEAD}]"
    # layers of --kv-cache-dtype-skip-layers keep bf16
    codes = cache.E4M3_TENSORS if deployment.kv_cache_dtype in cache.VLLM_E4M3 else ()
    if found.dtype not in ("bfloat16", *codes) or found.stride != 1:
        return f"the KV cache is {found.dtype} with stride {found.stride} in its last axis"
    why: str | None = attention.unsupported(heads, kv_heads, deployment.model.head_size, found.shape[2])
    return why


ANY_LORA = when(
    lambda d: d.lora and not d.lora_on_attention, "LoRA is not limited to attention (--lora-target-modules)"
)
LORA = (
    ANY_LORA,
    when(lambda d: d.lora and (d.tensor_parallel > 1 or d.drafts), "LoRA is on, with several GPUs or drafts"),
)
ATTENTION: tuple[Condition, ...] = (
    when(lambda d: d.dtype != "bfloat16", "activations are {d.dtype}, not bfloat16"),
    when(lambda d: d.decode_context_parallel > 1, "decode context parallelism is on"),
    when(lambda d: d.prefill_context_parallel > 1, "prefill context parallelism is on"),
    when(lambda d: d.micro_batches, "dual batch overlap is on"),
    when(lambda d: d.batch_invariant, "batch invariance is on"),
)
"""Attention of ours, in the fused layers or in vLLM's."""
PIECEWISE = when(lambda d: d.piecewise_graphs, "cudagraph_mode=PIECEWISE has no graph of a whole step")

LAYERS: tuple[Condition, ...] = (
    sm90,
    *ATTENTION,
    *LORA,
    when(
        lambda d: d.kv_cache_dtype not in ("auto", "bfloat16", *cache.VLLM_E4M3),
        "the KV cache is {d.kv_cache_dtype}, not bfloat16 or fp8_e4m3",
    ),
    when(lambda d: d.one_scale is False, "the fp8 KV cache has scales for each head"),
    when(lambda d: d.data_parallel > 1, "data parallelism is on"),
    when(lambda d: d.expert_parallel, "expert parallelism is on"),
    PIECEWISE,
    when(lambda d: d.compiled_whole, "the whole model is compiled by torch.compile"),
    when(lambda d: d.sequence_parallel, "sequence-parallel experts are on"),
    when(lambda d: d.offloaded, "weights are offloaded to the host"),
    when(lambda d: d.quantized_projections, "a projection is quantized"),
    when(
        lambda d: d.built_attention not in (None, "FLASH_ATTN"),
        "the attention backend is {d.built_attention}, not FLASH_ATTN",
    ),
    projections,
    paged_cache,
)
"""The fused layers, `engine/model/fused_path.py`."""


# One token in one launch


def whole_step(device: Device, deployment: Deployment) -> str | None:
    """The shape of a rank's share that `step.cu` is made for."""
    model, (heads, _), mine = deployment.model, deployment.heads, deployment.experts_of_a_rank
    ranks = deployment.tensor_parallel
    shape = step.Shape(model.layers, model.hidden, heads, mine.intermediate, model.experts, (0, 0), ranks=ranks)
    why: str | None = step.unsupported(shape)
    return why


ONE_LAUNCH: tuple[Condition, ...] = (
    when(lambda d: d.auxiliary_states, "a draft model reads states between layers"),
    when(lambda d: d.pipeline_parallel > 1, "a pipeline shares the model"),
    when(lambda d: d.own_experts is False, "another backend runs the experts, or maps them"),
    when(lambda d: d.model.active_experts != step.ACTIVE, f"not {step.ACTIVE} experts a token"),
    when(lambda d: d.one_rotary_cache is False, "layers have rotary caches of their own"),
    when(
        lambda d: any(found.shape[2] < step.MIN_BLOCK for found in d.caches),
        f"cache blocks of fewer than {step.MIN_BLOCK} tokens",
    ),
    when(lambda d: len({found.dtype for found in d.caches}) > 1, "layers have KV caches of several dtypes"),
    whole_step,
)
"""A step of one token, `engine/model/one_token.py`, where the fused layers run."""


# Decode steps of many tokens


def around_products(device: Device, deployment: Deployment) -> str | None:
    """The shape of one rank's layers, as the kernels around the products read it."""
    model, (heads, kv_heads) = deployment.model, deployment.heads
    why: str | None = norm_rope_router.unsupported(
        model.hidden, model.experts, model.active_experts
    ) or attention_many.unsupported(heads, kv_heads, model.head_size, WINDOW)
    return why


AROUND: tuple[Condition, ...] = (
    when(lambda d: d.pipeline_parallel > 1, "a pipeline shares the model: never run by us"),
    when(lambda d: d.own_experts is False, "another backend runs the experts, or maps them"),
    around_products,
)
"""Decode steps of many tokens, `engine/model/many_tokens.py`, where the fused layers run."""

OVER_TRITON: tuple[Condition, ...] = (
    when(lambda d: d.device_type != "cuda", "the kernel is a CUDA kernel"),
    *ATTENTION,
    when(lambda d: d.kv_cache_dtype not in ("auto", "bfloat16"), "the KV cache is {d.kv_cache_dtype}, not bfloat16"),
    when(lambda d: d.built_attention not in (None, "TRITON_ATTN"), "no --attention-backend TRITON_ATTN"),
)
"""Decode steps of vLLM's Triton attention, `engine/attention/sm80.py`. Its `obstacle` has the kernel's limits."""


# The experts


def expert_shapes(device: Device, deployment: Deployment) -> str | None:
    """Sizes of one rank's experts."""
    mine = deployment.experts_of_a_rank
    active = deployment.model.active_experts
    why: str | None = experts_plan.unsupported(mine.hidden, mine.intermediate, mine.count, active)
    return why


NO_LORA = when(lambda d: d.lora, "has no LoRA path")
NO_AITER = when(lambda d: not d.aiter, "VLLM_ROCM_USE_AITER is not set to 1")

_ANY_EXPERTS: tuple[Condition, ...] = (
    when(lambda d: d.dtype != "bfloat16", "activations are {d.dtype}, not bfloat16"),
    when(lambda d: d.micro_batches, "may not run on two streams at once, which dual-batch overlap does"),
    when(lambda d: d.mps, "MPS runs other processes' kernels concurrently, which would deadlock the plugin's"),
    when(lambda d: d.weighs_input, "the router's weight is applied on the input"),
    when(lambda d: d.moves_experts, "vLLM moves experts between ranks"),
    when(lambda d: d.load_format == "sharded_state", "--load-format sharded_state loads experts in another layout"),
    when(lambda d: d.expert_bias is False, "the experts have no bias"),
    when(
        lambda d: d.largest_scale is not None and d.largest_scale > experts_plan.MAX_SCALE,
        f"a scale is larger than e8m0 code {experts_plan.MAX_SCALE}",
    ),
)
EXPERTS: tuple[Condition, ...] = (
    sm90,
    ANY_LORA,
    expert_shapes,
    when(lambda d: d.built_experts not in (None, "TRITON"), "the backend is {d.built_experts}, not TRITON"),
    when(lambda d: d.monolithic is False, "this parallel configuration routes tokens between ranks"),
    *_ANY_EXPERTS,
)
"""The kernels for few tokens over `triton`'s weights, `engine/experts/method.py`."""


def marlin_shapes(device: Device, deployment: Deployment) -> str | None:
    """Sizes of one rank's experts, with vLLM's padding where ranks share them."""
    mine, model = deployment.experts_of_a_rank, deployment.model
    intermediate = model.intermediate if deployment.expert_ranks == 1 else mine.intermediate
    why: str | None = experts_marlin.unsupported(
        model.hidden, intermediate, mine.count, model.active_experts, nvrtc.shared_limit(device.arch)
    )
    return why


EXPERTS_OVER_MARLIN: tuple[Condition, ...] = (
    when(lambda d: d.device_type != "cuda", "the kernels are CUDA kernels"),
    ANY_LORA,
    when(lambda d: d.data_parallel > 1 or d.expert_parallel, "ranks hold different experts"),
    marlin_shapes,
    when(lambda d: d.built_experts not in (None, "MARLIN"), "the backend is {d.built_experts}, not MARLIN"),
    *_ANY_EXPERTS,
)
"""The kernels for few tokens over `marlin`'s weights, `engine/experts/sm80.py`."""


# The runner


NOTIFIED = ("OffloadingConnector", "NixlConnector", "LMCacheConnectorV1", "LMCacheMPConnector")
"""KV connectors that read no attention metadata of a step in a FULL graph."""


def notified_connectors(device: Device, deployment: Deployment) -> str | None:
    """Of the runner: other KV connectors, alone or in a MultiConnector."""
    del device
    others = [name for name in deployment.kv_connectors if name not in NOTIFIED]
    return f"the KV connector {', '.join(others)}" if others else None


RUNNER: tuple[Condition, ...] = (
    sm90,
    when(
        lambda d: d.pipeline_parallel * d.data_parallel * d.prefill_context_parallel * d.decode_context_parallel > 1,
        "pipeline, data or context parallelism is on",
    ),
    when(lambda d: d.drafts not in (None, "eagle3"), "drafts by {d.drafts}"),
    *LORA,
    notified_connectors,
    when(lambda d: d.moves_experts, "vLLM moves experts between ranks"),
    PIECEWISE,
    when(lambda d: not d.graphs, "no CUDA graphs are captured"),
)
"""Replayed decode steps, `engine/runner/model_runner.py`. `engine/runner/eligibility.py` adds what only vLLM's built
runner shows."""


# What was run on a GPU


def beyond(measured: Measured, *, whole: bool) -> tuple[Condition, ...]:
    """Combinations that were never run; they require an explicit setting. whole: the layers, not the experts alone."""
    sizes = measured.tensor_parallel
    ranks = when(lambda d: d.expert_ranks not in sizes or d.expert_parallel, f"more than {max(sizes)} GPUs")
    if not whole:
        return (ranks,)

    def never_connected(device: Device, deployment: Deployment) -> str | None:
        del device
        others = [name for name in deployment.kv_connectors if name not in measured.kv_connectors]
        return f"the KV connector {', '.join(others)}" if others else None

    return (
        when(
            lambda d: d.tensor_parallel not in sizes or d.pipeline_parallel not in measured.pipeline_parallel,
            f"more than {max(sizes)} GPUs, or a pipeline",
        ),
        when(lambda d: d.drafts not in (None, *measured.drafts), "drafts by {d.drafts}"),
        when(
            lambda d: (
                d.kv_cache_dtype in cache.VLLM_E4M3
                and bool(d.drafts or d.lora or d.kv_connectors or d.tensor_parallel > 1)
            ),
            "a KV cache of {d.kv_cache_dtype} with drafts, LoRA, a KV connector or several GPUs",
        ),
        never_connected,
    )
