"""A layer's tensors, and where vLLM keeps what changes from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vllm_gptoss.kernels.layer import LayerTensors, Requests


@dataclass(slots=True)
class Place:
    """One layer in vLLM. name: its key in the forward context."""

    name: str
    tensors: LayerTensors
    attention: Any
    """vLLM's `Attention`: holds `kv_cache`, which vLLM makes anew after profiling its graphs with a small one."""
    runner: Any
    """vLLM's MoE runner."""

    def requests(self, context: Any) -> Requests:
        """The step's requests, of a `ForwardContext`."""
        metadata = context.attn_metadata[self.name]
        return Requests(
            metadata.block_table, metadata.seq_lens, metadata.query_start_loc, context.slot_mapping[self.name]
        )

    def others(self, normed: Tensor, logits: Tensor) -> Tensor:
        """vLLM's experts of this layer: normed [T, C] bf16, logits [T, E] f32; [T, C] bf16, summed over ranks."""
        return self.runner(hidden_states=normed, router_logits=logits.to(normed.dtype))  # type: ignore[no-any-return]
