"""A layer's tensors, and where vLLM keeps what changes from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from vllm_gptoss._vllm import worker
from vllm_gptoss.engine.kernels.cache import Fp8Cache, PagedCache
from vllm_gptoss.engine.kernels.layer import LayerTensors, Requests

if TYPE_CHECKING:
    from vllm_gptoss.engine.experts.sm90 import LayerExperts


@dataclass(slots=True)
class Place:
    """One layer in vLLM. name: its key in the forward context."""

    name: str
    tensors: LayerTensors
    attention: Any
    """vLLM's `Attention`. Its `kv_cache` is small while graphs are profiled, and is then allocated again."""
    runner: Any
    """vLLM's MoE runner."""
    experts: LayerExperts | None = None
    """The plugin's expert kernels for steps of any size. None if another backend runs the experts."""
    weights: tuple[tuple[nn.Module, str, int], ...] = ()
    """Module, name and address of each parameter that `tensors` refers to."""
    layer: Any = None
    """vLLM's `TransformerBlock`."""
    scales: tuple[Tensor, Tensor] | None = None
    """Of the keys and of the values of an e4m3 cache, one float32 each. None: the cache is bf16."""

    @property
    def cache(self) -> PagedCache:
        """The paged cache as it is now."""
        cache = self.attention.kv_cache
        return cache if self.scales is None else Fp8Cache(cache, *self.scales)

    def requests(self, context: Any) -> Requests:
        """The step's requests, of a `ForwardContext`."""
        metadata = context.attn_metadata[self.name]
        return Requests(
            metadata.block_table, metadata.seq_lens, metadata.query_start_loc, context.slot_mapping[self.name]
        )

    def others(self, normed: Tensor, logits: Tensor) -> Tensor:
        """vLLM's experts of this layer: normed [T, C] bf16, logits [T, E] f32; [T, C] bf16, summed over ranks."""
        return self.runner(hidden_states=normed, router_logits=logits.to(normed.dtype))  # type: ignore[no-any-return]


@contextmanager
def transferred(places: Sequence[Place], context: Any) -> Iterator[None]:
    """Notifies a KV connector around code that reads and writes the caches of `places`.

    Equal to vLLM's `maybe_transfer_kv_layer` (`model_executor/layers/attention/kv_transfer_utils.py`) around its own
    attention. As in vLLM, the replay of a graph notifies no connector: a connector that needs each layer requires
    PIECEWISE graphs, and vLLM runs those steps.
    """
    connector = worker.kv_connector()
    if connector is None:
        yield
        return
    for place in places:
        connector.wait_for_layer_load(place.name)
    yield
    for place in places:
        connector.save_kv_layer(place.name, place.attention.kv_cache, context.attn_metadata[place.name])
