"""The plugin's decode kernel in layers that vLLM built with a backend of `sm90.py` or `sm80.py`.

Decode steps, of one token a request or the few of `choose.tokens_per_request`, run `engine/kernels/attention_many.py`.
vLLM runs all other steps and writes the KV cache. The maximum query length in the metadata decides. A graph of decode
steps is captured with one token a request, or with one more than the drafts, and no step with more replays it
(`CudaGraphManager` of vllm/v1/worker/gpu/cudagraph_utils.py). With `cudagraph_mode` FULL, a graph serves steps with any
number; it contains vLLM's attention, unless it is of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl

from vllm_gptoss import fallback, startup_line
from vllm_gptoss.engine.choose.bands import ATTENTION_TOKENS
from vllm_gptoss.engine.kernels import attention_many, cache, nvrtc


def is_ours(tokens: int, longest: int, most: int, least: int) -> bool:
    """Whether our kernel runs a step. longest: the metadata's maximum query length; most, least: of a step of ours."""
    return longest <= most and least <= tokens <= ATTENTION_TOKENS


class DecodeAttention(AttentionImpl):
    """A base, before vLLM's class, of one layer's attention. Steps for which `is_ours` holds run the plugin's kernel.

    upstream: the name of vLLM's attention; arch: what `nvrtc.load` compiles for; least: tokens of a step of ours.
    most_per_request: tokens of one request in such a step; 0 until `set_up` and after a fault: vLLM runs all steps.
    """

    upstream: str
    arch: str
    least = 1
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
        if plain and is_ours(step.num_actual_tokens, step.max_query_len, self.most_per_request, self.least):
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
            self.scale, self.window, attention_many.plan(tokens, self.window, arch=self.arch),
        )  # fmt: skip
        return output

    @property
    def window(self) -> int:
        """Keys a token sees, itself included; 0: all."""
        return int(self.sliding_window[0]) + 1

    def obstacle(self, dtype: torch.dtype) -> str | None:
        """Why the kernel cannot be this attention, or None. dtype: of the layer's queries."""
        if self.kv_cache_dtype not in ("auto", "bfloat16") or dtype != torch.bfloat16:
            return f"queries are {dtype}, the KV cache {self.kv_cache_dtype}"
        if self.sinks is None or self.sinks.dtype != torch.bfloat16:
            return "no sinks in bfloat16"
        if self.alibi_slopes is not None or self.logits_soft_cap or self.attn_type != "decoder":
            return "ALiBi, a soft cap, or an encoder"
        why: str | None = attention_many.unsupported(self.num_heads, self.num_kv_heads, self.head_size, self.window)
        return why


def set_up(model: Any, per_request: int = 1) -> bool:
    """Makes our kernel run decode steps in the layers that vLLM built with our backend; whether there are any.

    per_request: most tokens of one request in a step that our kernel takes.
    """
    attention = [layer.attn.attn for layer in model.model.layers if hasattr(layer, "attn")]
    ours = [layer for layer in attention if issubclass(layer.attn_backend.get_impl_cls(), DecodeAttention)]
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
    if why := next(filter(None, (layer.impl.obstacle(layer.dtype) for layer in layers)), None):
        startup_line.note("attention of vLLM's layers", f"{layers[0].impl.upstream} ({why})")
        return False
    device, impls = torch.cuda.current_device(), [layer.impl for layer in layers]
    nvrtc.at_once((attention_many.load, device, of.num_kv_heads, of.window, cache.BF16, of.arch) for of in impls)
    return True
