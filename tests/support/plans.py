"""The parts of a step and of FlashAttention's metadata builder that the plugin reads, for tests without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from vllm.config import CUDAGraphMode

from vllm_gptoss.engine.attention import sm90


@dataclass
class Common:
    """The part of vLLM's object that the builder reads."""

    num_actual_tokens: int
    max_query_len: int = 1
    max_seq_len: int = 90

    def replace(self, **changed: int) -> Common:
        return replace(self, **changed)


def builder(
    *windows: tuple[int, int],
    mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE,
    largest: int = 64,
    drafts: int = 0,
) -> Any:
    of = object.__new__(sm90.GptOssFlashAttentionBackend.get_builder_cls())
    layers = {str(index): SimpleNamespace(impl=SimpleNamespace(sliding_window=w)) for index, w in enumerate(windows)}
    of.compilation_config = SimpleNamespace(static_forward_context=layers, cudagraph_mode=mode)
    of.vllm_config = SimpleNamespace(compilation_config=of.compilation_config, num_speculative_tokens=drafts)
    of.model_config = SimpleNamespace(max_model_len=4096)
    of.use_full_cuda_graph, of.max_cudagraph_size = mode.has_full_cudagraphs(), largest
    of.layer_names, of.aot_sliding_window = list(layers), None
    return of
