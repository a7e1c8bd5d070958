"""A KV connector that keeps every layer's cache elsewhere between steps: here there is only NaN.

A path that loads too late reads NaN; a path that does not save has no cache in the next step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_initialized, get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class Elsewhere(KVConnectorBase_V1, SupportsHMA):
    """The worker's side; nothing is scheduled."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.kept: dict[str, tuple[Tensor, Tensor]] = {}
        self.saved = 0

    def wait_for_layer_load(self, layer_name: str) -> None:
        if layer_name in self.kept:
            cache, content = self.kept.pop(layer_name)
            cache.copy_(content)

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **_: Any) -> None:
        assert layer_name not in self.kept, "given back twice, or never requested"
        assert attn_metadata.block_table is not None
        self.kept[layer_name] = kv_layer, kv_layer.clone()
        kv_layer.fill_(float("nan"))
        self.saved += 1

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **_: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()


def connect(config: Any) -> Elsewhere:
    """As vLLM's worker does when it starts and before each step."""
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="Elsewhere", kv_role="kv_both", kv_connector_module_path=__name__
    )
    ensure_kv_transfer_initialized(config, kv_cache_config=None)  # type: ignore[arg-type]
    connector = get_kv_transfer_group()
    assert isinstance(connector, Elsewhere)
    connector.bind_connector_metadata(KVConnectorMetadata())
    return connector
