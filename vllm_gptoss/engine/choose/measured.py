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


SM90: Final = Measured(
    "H200",
    tensor_parallel=(1, 2),
    pipeline_parallel=(1,),
    drafts=("ngram", "eagle3"),
    kv_connectors=("ExampleConnector", "OffloadingConnector"),
)
