"""FlashAttention 3's backend for gpt-oss's layers (sm90): our kernel for decode steps, one FA3 plan per step.

Decode steps of up to `ATTENTION_TOKENS` tokens, one token a request or the few of `choose.tokens_per_request`, run
`engine/kernels/attention_many.py`, which needs no plan. The maximum query length in the metadata decides. A graph of
decode steps is captured with one token a request, or with one more than the drafts, and no step with more replays it
(`CudaGraphManager` of vllm/v1/worker/gpu/cudagraph_utils.py). With `cudagraph_mode` FULL, a graph serves steps with any
number; it contains FA3. Up to `FUSED_TOKENS` tokens the fused layers use their own kernel.

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

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_gptoss import fallback, startup_line
from vllm_gptoss._vllm import worker
from vllm_gptoss.engine.choose.bands import ATTENTION_TOKENS, FUSED_TOKENS
from vllm_gptoss.engine.kernels import attention_many, nvrtc


def is_ours(tokens: int, longest: int, most: int) -> bool:
    """Whether our kernel runs a step. longest: the maximum query length in the metadata of FA3; most: of ours."""
    return longest <= most and FUSED_TOKENS < tokens <= ATTENTION_TOKENS


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
        ours = is_ours(tokens, common.max_query_len, self._most_per_request())
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


class GptOssFlashAttentionImpl(FlashAttentionImpl):
    """vLLM's attention of one layer. Steps for which `is_ours` holds run the plugin's kernel.

    most_per_request: tokens of one request in such a step; 0 until `set_up` and after a fault: vLLM runs all steps.
    """

    most_per_request = 0

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Any:
        """As upstream's: query, output [T, H, 64]; kv_cache [blocks, K, block size, 128], where K and V are already."""
        plain = attn_metadata is not None and output_scale is None and output_block_scale is None
        step = attn_metadata
        if plain and is_ours(step.num_actual_tokens, step.max_query_len, self.most_per_request):
            done = fallback.attempt("attention", "auto", lambda: self._attend(query, kv_cache, step, output))
            if done is not None:
                return done
            self.most_per_request = 0
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )

    def _attend(self, query: Tensor, kv_cache: Tensor, step: Any, output: Tensor) -> Tensor:
        """Runs the plugin's decode kernel.

        Raises:
            UnavailableError: a tensor or the step is not what the kernel reads.
            NvrtcError: the kernel cannot be launched.
        """
        why = attention_many.unreadable(query, kv_cache, output)
        if why is None and step.causal is not True:
            why = "the step is not causal"
        if why is not None:
            raise fallback.UnavailableError(why)
        tokens = step.num_actual_tokens
        if tokens < query.shape[0]:
            query = query[:tokens]
        attention_many.attend(
            query, kv_cache, self.sinks, step.block_table, step.seq_lens, step.query_start_loc, output,
            self.scale, self.window,
        )  # fmt: skip
        return output

    @property
    def window(self) -> int:
        """Keys a token sees, itself included; 0: all."""
        left: int = self.sliding_window[0]
        return left + 1


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
    ours = GptOssFlashAttentionBackend
    if worker.flash_attention_version() != 3:
        return nullcontext()
    backend: AbstractContextManager[None] = worker.flash_attention_backend(f"{ours.__module__}.{ours.__qualname__}")
    return backend


def set_up(model: Any, per_request: int = 1) -> bool:
    """Makes our kernel run decode steps in the layers that vLLM built with this backend; whether there are any.

    per_request: most tokens of one request in a step that our kernel takes.
    """
    attention = [layer.attn.attn for layer in model.model.layers if hasattr(layer, "attn")]
    ours = [layer for layer in attention if layer.attn_backend is GptOssFlashAttentionBackend]
    if not ours:
        return False
    if fallback.attempt("attention", "auto", lambda: compiled(ours)):
        for layer in ours:
            layer.impl.most_per_request = per_request
    return True


def compiled(layers: Sequence[Any]) -> bool:
    """Compiles the kernels of `layers`. False if the kernel does not compute a layer's attention.

    The start-up line has the reason. The fused layers may run nevertheless: they choose their attention kernels
    themselves.

    Raises:
        NvrtcError: a kernel cannot be compiled or loaded.
    """
    if why := next(filter(None, map(obstacle, layers)), None):
        startup_line.note("attention of vLLM's layers", f"FlashAttention 3 ({why})")
        return False
    device = torch.cuda.current_device()
    nvrtc.at_once((attention_many.load, device, layer.impl.num_kv_heads, layer.impl.window) for layer in layers)
    return True


def obstacle(layer: Any) -> str | None:
    """Why the kernel cannot be this layer's attention, or None."""
    impl = layer.impl
    if impl.vllm_flash_attn_version != 3:
        return f"a layer's attention is FlashAttention {impl.vllm_flash_attn_version}"
    if impl.kv_cache_dtype not in ("auto", "bfloat16") or layer.dtype != torch.bfloat16:
        return f"queries are {layer.dtype}, the KV cache {impl.kv_cache_dtype}"
    if impl.sinks is None or impl.sinks.dtype != torch.bfloat16:
        return "no sinks in bfloat16"
    if impl.alibi_slopes is not None or impl.logits_soft_cap or impl.attn_type != "decoder":
        return "ALiBi, a soft cap, or an encoder"
    if impl.dcp_world_size > 1 or impl.batch_invariant_enabled:
        return "context parallelism or batch invariance is on"
    window = impl.sliding_window[0] + 1
    why: str | None = attention_many.unsupported(impl.num_heads, impl.num_kv_heads, impl.head_size, window)
    return why
