"""The only list of GPUs on which our kernels were measured. The numbers are in benchmarks/results/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Measured:
    """Configurations that ran on a GPU of this family."""

    gpu: str
    tensor_parallel: tuple[int, ...]
    pipeline_parallel: tuple[int, ...]
    drafts: tuple[str, ...]
    kv_connectors: tuple[str, ...]
    """Of the layers."""
    host_kv_connectors: tuple[str, ...]
    """Of the runner, compared with vLLM's."""
    tokens_per_request: int
    """Most tokens of one request in steps of 17 to 512 tokens, with drafts one more than those."""
    host_ranks: tuple[int, ...]
    """Sizes of a tensor-parallel group for which the plugin's runner and scheduler prepare decode steps."""
    push_ranks: tuple[int, ...]
    """The same, where ranks sum by stores into each other's memory, in decode steps of up to 512 tokens."""


SM90: Final = Measured(
    "H200",
    tensor_parallel=(1, 2),
    pipeline_parallel=(1,),
    drafts=("ngram", "eagle3"),
    kv_connectors=("ExampleConnector", "OffloadingConnector"),
    host_kv_connectors=("OffloadingConnector",),  # decode-h200-options-2026-11-29.json
    tokens_per_request=4,  # drafts-120b-h200-2026-11-28.json
    host_ranks=(1, 2),
    push_ranks=(1, 2),  # decode-2xh200-2026-11-29.json
)
