"""vLLM's Triton attention for gpt-oss's layers (Ampere, Ada, Blackwell RTX): our kernel for decode steps.

Decode steps of up to `ATTENTION_TOKENS` tokens, one a request, run our kernel; `decode.py` has the rule. vLLM's builder
prepares nothing that depends on whose attention runs, so it stays.

vLLM builds the layers with this backend: `engine/model/gpt_oss.py` registers it as `TRITON_ATTN` meanwhile.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from vllm_gptoss._vllm import worker
from vllm_gptoss.engine.attention.decode import DecodeAttention
from vllm_gptoss.engine.choose import device
from vllm_gptoss.engine.kernels import nvrtc


class GptOssTritonAttentionImpl(DecodeAttention, TritonAttentionImpl):
    """vLLM's attention of one layer."""

    upstream = "Triton"

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.arch = nvrtc.target(torch.cuda.current_device(), device.detect().arch)

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
        rest = kv_cache, attn_metadata, output, output_scale, output_block_scale
        done = self.decoded(query, *rest)
        return super().forward(layer, query, key, value, *rest) if done is None else done


class GptOssTritonAttentionBackend(TritonAttentionBackend):
    """Upstream's backend with our attention, under upstream's name."""

    @staticmethod
    def get_impl_cls() -> type[GptOssTritonAttentionImpl]:
        """The attention above."""
        return GptOssTritonAttentionImpl


def registered() -> AbstractContextManager[None]:
    """While it is open, layers that vLLM builds for Triton attention get this backend."""
    backend: AbstractContextManager[None] = worker.attention_backend(GptOssTritonAttentionBackend)
    return backend
