"""What is to be served and how: plain facts, known before anything is touched.

`vllm_gptoss/engine/choose/vllm_config.py` fills them in from vLLM's configuration; tests write them by hand. Facts that
a start learns late (scale codes, what vLLM built, the cache) are None until then, and None is never an obstacle.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_gptoss.engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KvCache:
    """The paged KV cache of one layer. shape: of the tensor; stride: of its last axis, in values."""

    shape: tuple[int, ...]
    dtype: str
    stride: int


@dataclass(frozen=True, slots=True)
class RankExperts:
    """One rank's experts as their parameters lie in memory, vLLM's padding included."""

    count: int
    hidden: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model, its configuration, and the facts that startup has found so far. Dtypes and names are vLLM's.

    `kv_cache_dtype`: `auto`, `bfloat16`, `fp8`, …; `kv_connectors`: those of `kv_transfer_config`; `drafts`: the method
    of speculative decoding; `draft_tokens`: most drafts of a request in a step; `micro_batches`: dual-batch overlap,
    two steps on two streams at once; `attention_backend`, `moe_backend`: the user's settings.
    """

    model: ModelSpec
    device_type: str = "cuda"
    dtype: str = "bfloat16"

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    decode_context_parallel: int = 1
    prefill_context_parallel: int = 1
    custom_all_reduce: bool = True
    expert_parallel: bool = False
    sequence_parallel: bool = False
    micro_batches: bool = False

    kv_cache_dtype: str = "auto"
    kv_connectors: tuple[str, ...] = ()
    lora: bool = False
    lora_on_attention: bool = False
    """Adapters change only attention's projections, and steps without an adapter have CUDA graphs of their own."""
    drafts: str | None = None
    draft_tokens: int = 0
    piecewise_graphs: bool = False
    compiled_whole: bool = False
    batch_invariant: bool = False
    graphs: bool = True
    """CUDA graphs are captured."""
    offloaded: bool = False
    """Weights lie in the host's memory, or move between it and the GPU."""
    moves_experts: bool = False
    """Expert load balancing or elastic expert parallelism."""
    load_format: str = "auto"
    aiter: bool = False
    """VLLM_ROCM_USE_AITER: without it vLLM uses no AITER kernel."""
    mps: bool = False
    """CUDA's Multi-Process Service runs kernels of other processes concurrently with those of this process."""
    attention_backend: str | None = None
    moe_backend: str = "auto"

    # Known once vLLM has built the model.
    built_attention: str | None = None
    quantized_projections: bool | None = None
    built_experts: str | None = None
    monolithic: bool | None = None
    expert_bias: bool | None = None
    weighs_input: bool | None = None
    """The router's weight is applied on the experts' input."""

    # Known once the weights are there.
    rank_experts: RankExperts | None = None
    largest_scale: int | None = None
    own_experts: bool | None = None
    """Our kernels run the experts of every layer, without an expert map."""

    # Known at the first step.
    caches: tuple[KvCache, ...] = ()
    """One of each kind."""
    one_scale: bool | None = None
    """The keys of an fp8 cache have one scale a layer, its values another; not one for each head."""
    one_rotary_cache: bool | None = None
    auxiliary_states: bool | None = None
    """A draft model reads states between layers."""

    @property
    def expert_ranks(self) -> int:
        """Ranks that cut each expert's rows; with expert parallelism each expert is whole."""
        ranks = self.tensor_parallel * self.data_parallel * self.prefill_context_parallel
        return 1 if self.expert_parallel else ranks

    @property
    def experts_of_a_rank(self) -> RankExperts:
        """As found, else as vLLM's `triton` experts will lay them out: rows rounded up to 64."""
        if self.rank_experts is not None:
            return self.rank_experts
        intermediate = -(-self.model.intermediate // self.expert_ranks // 64) * 64
        return RankExperts(self.model.experts, self.model.hidden, intermediate)

    @property
    def heads(self) -> tuple[int, int]:
        """Query and key/value heads of one rank."""
        return self.model.query_heads // self.tensor_parallel, self.model.kv_heads // self.tensor_parallel
