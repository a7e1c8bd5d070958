"""FlashAttention 3 with its schedule made once per step, where it serves gpt-oss's layers (sm90).

FA3 plans how it splits keys over the GPU. vLLM makes that plan ahead of a step, for all layers at once, only where
every layer of the model has the same window (`_get_sliding_window_configs` of 0.33.0); gpt-oss alternates two, so each
of its 24 or 36 layers launches the planner again. A metadata builder serves one group of the KV cache, though, and the
layers of a group have one window: that is all this backend tells it.

Covered: steps that upstream's layers run. Up to `FUSED_TOKENS` tokens have an attention of their own and need no plan.

A plan's layout follows from the window, from the longest sequence and from whether any request has several tokens
(`mha_fwd_get_scheduler_metadata` of vLLM's flash-attention, hopper/flash_api.cpp). A FULL graph keeps what was true
when it was captured. So every step that one may replay is planned as the capture was.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder

from vllm_gptoss import aside
from vllm_gptoss._vllm import worker
from vllm_gptoss.choose.bands import FUSED_TOKENS


class GptOssFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    """Upstream's builder, planning for the window of its own layers."""

    aot_sliding_window: tuple[int, int] | None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """As upstream's; the same size decides when a graph is captured and when it is replayed, padding included."""
        if self.aot_sliding_window is None:
            self.aot_sliding_window = aside.attempt("attention plan", "auto", self._window)
        few = common_attn_metadata.num_actual_tokens <= FUSED_TOKENS
        common = common_attn_metadata if few else self._as_captured(common_attn_metadata)
        return super().build(common_prefix_len, common, fast_build or few)

    def _as_captured(self, common: Any) -> Any:
        """`common` with the bounds of a captured graph, which hold for every step that may replay it."""
        if not self.use_full_cuda_graph or common.num_actual_tokens > (self.max_cudagraph_size or 0):
            return common
        decode_alone = self.compilation_config.cudagraph_mode.separate_routine()
        several = not decode_alone or self.vllm_config.num_speculative_tokens > 0
        longest = common.num_actual_tokens if several else common.max_query_len
        return common.replace(max_seq_len=self.model_config.max_model_len, max_query_len=longest)

    def _window(self) -> tuple[int, int] | None:
        """The window that all layers of this group share; None where they differ, and upstream then makes no plan."""
        layers = self.vllm_config.compilation_config.static_forward_context
        windows = {layers[name].impl.sliding_window for name in self.layer_names}
        return windows.pop() if len(windows) == 1 else None


class GptOssFlashAttentionBackend(FlashAttentionBackend):
    """Upstream's backend with our builder, under upstream's name."""

    @staticmethod
    def get_builder_cls() -> type[GptOssFlashAttentionMetadataBuilder]:
        """The builder above."""
        return GptOssFlashAttentionMetadataBuilder


def plan_once(model: Any) -> bool:
    """Gives this backend to the layers of `model` that vLLM built for FlashAttention 3; whether there are any."""
    if worker.flash_attention_version() != 3:
        return False
    attention = [layer.attn.attn for layer in model.model.layers if hasattr(layer, "attn")]
    ours = [layer for layer in attention if layer.attn_backend is FlashAttentionBackend]
    for layer in ours:
        layer.attn_backend = GptOssFlashAttentionBackend
    return bool(ours)
