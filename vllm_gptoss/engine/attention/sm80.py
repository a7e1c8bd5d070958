"""vLLM's Triton attention for gpt-oss's layers (Ampere, Ada, Blackwell RTX): our kernel for decode steps (`decode.py`).

vLLM builds the layers with this backend: `engine/model/gpt_oss.py` registers it as `TRITON_ATTN` meanwhile. Upstream's
builder stays, because nothing that it prepares depends on which attention runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
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
