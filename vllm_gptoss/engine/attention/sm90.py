"""FlashAttention 3's backend for gpt-oss's layers (sm90): our kernel for decode steps, one FA3 plan per step.

Decode steps of up to `ATTENTION_TOKENS` tokens run our kernel, which needs no plan; `decode.py` has the rule. Up to
`FUSED_TOKENS` tokens the fused layers use their own kernel.

FA3 plans how it splits keys over the GPU. vLLM makes one plan for all layers only if every layer of the model has the
same window (`_get_sliding_window_configs` of 0.33.0). gpt-oss alternates two windows, so each of its 24 or 36 layers
would launch the planner. A metadata builder serves one group of the KV cache. All layers of a group have the same
window, and this backend sets that window on the builder.

The layout of a plan depends on the window, the longest sequence and whether a request has several tokens
(`mha_fwd_get_scheduler_metadata` of vLLM's flash-attention, hopper/flash_api.cpp). A FULL graph contains the layout of
its capture, so every step that may replay it is planned in the same way.

vLLM builds the layers with this backend: `engine/model/gpt_oss.py` registers it as `FLASH_ATTN` meanwhile.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_gptoss import fallback
from vllm_gptoss._vllm import worker
from vllm_gptoss.engine.attention.decode import DecodeAttention, is_ours
from vllm_gptoss.engine.choose.bands import FUSED_TOKENS

LEAST = FUSED_TOKENS + 1
"""Tokens of the smallest step whose layers are vLLM's."""


class GptOssFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    """vLLM's builder, which plans for the window of its group of layers."""

    aot_sliding_window: tuple[int, int] | None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """As upstream's; the same size decides when a graph is captured and when it is replayed, padding included."""
        if self.aot_sliding_window is None:
            self.aot_sliding_window = fallback.attempt("attention plan", "auto", self._window)
        tokens = common_attn_metadata.num_actual_tokens
        few = tokens <= FUSED_TOKENS
        common = common_attn_metadata if few else self._as_captured(common_attn_metadata)
        ours = is_ours(tokens, common.max_query_len, self._most_per_request(), LEAST)
        return super().build(common_prefix_len, common, fast_build or few or ours)

    def _as_captured(self, common: Any) -> Any:
        """`common` with the bounds of a captured graph, which hold for every step that may replay it."""
        if not self.use_full_cuda_graph or common.num_actual_tokens > (self.max_cudagraph_size or 0):
            return common
        longest = common.num_actual_tokens
        if self.compilation_config.cudagraph_mode.separate_routine():
            longest = max(common.max_query_len, 1 + self.vllm_config.num_speculative_tokens)
        return common.replace(max_seq_len=self.model_config.max_model_len, max_query_len=longest)

    def _most_per_request(self) -> int:
        layers = self.vllm_config.compilation_config.static_forward_context
        return int(min(getattr(layers[name].impl, "most_per_request", 0) for name in self.layer_names))

    def _window(self) -> tuple[int, int] | None:
        """The window that all layers of this group share; None where they differ, and upstream then makes no plan."""
        layers = self.vllm_config.compilation_config.static_forward_context
        windows = {layers[name].impl.sliding_window for name in self.layer_names}
        return windows.pop() if len(windows) == 1 else None


class GptOssFlashAttentionImpl(DecodeAttention, FlashAttentionImpl):
    """vLLM's attention of one layer."""

    upstream, arch, least = "FlashAttention 3", "sm_90", LEAST

    def obstacle(self, dtype: torch.dtype) -> str | None:
        """As the kernel's, and what the plan and FA3 need."""
        if self.vllm_flash_attn_version != 3:
            return f"a layer's attention is FlashAttention {self.vllm_flash_attn_version}"
        if self.dcp_world_size > 1 or self.batch_invariant_enabled:
            return "context parallelism or batch invariance is on"
        return super().obstacle(dtype)


class GptOssFlashAttentionBackend(FlashAttentionBackend):
    """Upstream's backend with our builder and our attention, under upstream's name."""

    @staticmethod
    def get_builder_cls() -> type[GptOssFlashAttentionMetadataBuilder]:
        """The builder above."""
        return GptOssFlashAttentionMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[GptOssFlashAttentionImpl]:
        """The attention above."""
        return GptOssFlashAttentionImpl


def registered() -> AbstractContextManager[None]:
    """While it is open, layers that vLLM builds for FlashAttention 3 get this backend."""
    if worker.flash_attention_version() != 3:
        return nullcontext()
    backend: AbstractContextManager[None] = worker.attention_backend(GptOssFlashAttentionBackend)
    return backend
