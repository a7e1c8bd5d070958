"""GPU memory of a gpt-oss server: sizes from the model's shape, and constants from measured starts.

`weights` and `Cache` are arithmetic over what vLLM allocates. `OVERHEADS` are fitted: tests hold every measured start
(`MEASURED`) within 5 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from vllm_gptoss.engine.choose import Deployment
from vllm_gptoss.engine.spec import MXFP4_GROUP, WINDOW, ModelSpec

GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class Layout:
    """A backend's layout of experts. rows, columns: one rank's sizes are rounded up to multiples of them; bits: of a
    value; padding: of its scales, as a share of all.

    Source: vLLM 0.33.0 `mxfp4_round_up_hidden_size_and_intermediate_size`; `padding` is measured.
    """

    rows: int
    columns: int
    bits: float = 4 + 8 / MXFP4_GROUP
    padding: float = 0.0


_MARLIN: Final = Layout(128, 256)
_ROCM: Final = Layout(256, 256)
LAYOUTS: Final[Mapping[str, Layout]] = {
    "gptoss": Layout(64, 1, padding=0.0099),
    "triton": Layout(64, 1, padding=0.0099),
    "humming": Layout(64, 256),
    "marlin": _MARLIN,
    "flashinfer_trtllm": _MARLIN,
    "flashinfer_trtllm_mxfp8": _MARLIN,
    "flashinfer_cutlass": Layout(128, 128),
    "aiter": _ROCM,
    "native": Layout(32, 32),
    "dequantize": Layout(32, 32, bits=16),
}
"""By value of `choose.experts`; other backends count as the widest, ROCm's."""


@dataclass(frozen=True, slots=True)
class Weights:
    """GiB on one GPU."""

    experts: float
    rest: float
    draft: float

    @property
    def total(self) -> float:
        return self.experts + self.rest + self.draft


DRAFTS: Final[Mapping[str, tuple[float, int]]] = {"eagle3": (1.5, 1), "dflash": (1.46, 8)}
"""GiB and attention layers of a draft head for gpt-oss, by method. Source: the sizes of the published heads."""


def weights(d: Deployment, experts: str) -> Weights:
    """Weights on one GPU. experts: the backend, as `choose` names it."""
    model, layout = d.model, LAYOUTS.get(experts, _ROCM)
    ranks = d.tensor_parallel * d.data_parallel * d.prefill_context_parallel
    cut = 1 if d.expert_parallel else ranks
    rows, columns = _up(-(-model.intermediate // cut), layout.rows), _up(model.hidden, layout.columns)
    count = -(-model.experts // ranks) if d.expert_parallel else model.experts
    layers = -(-model.layers // d.pipeline_parallel)
    values = layers * count * 3 * rows * columns
    biases = 4 * layers * count * (2 * rows + columns)
    attention = 2 * model.layers * model.hidden * model.head_size * 2 * (model.query_heads + model.kv_heads)
    router = 2 * layers * model.experts * model.hidden
    embeddings = 2 * 2 * model.vocabulary * model.hidden
    rest = attention / d.pipeline_parallel / d.tensor_parallel + router + embeddings / d.tensor_parallel
    shares = (values * layout.bits / 8 * (1 + layout.padding) + biases) / GIB
    return Weights(shares, rest / GIB, DRAFTS.get(d.drafts or "", (0, 0))[0])


@dataclass(frozen=True, slots=True)
class Cache:
    """The paged KV cache as vLLM groups gpt-oss's layers: every other one has a window, and the groups share blocks.

    Source: vLLM 0.32.0 and 0.33.0 `v1/kv_cache_interface.py` and `v1/core/kv_cache_utils.py`; tests compare.
    """

    block_size: int
    block_bytes: int
    full_groups: int
    window_groups: int

    @classmethod
    def of(cls, d: Deployment, block_size: int) -> Cache:
        values = max(1, d.model.kv_heads // d.tensor_parallel) * 2 * d.model.head_size
        bytes_each = 2 if d.kv_cache_dtype in ("auto", "bfloat16", "float16") else 1
        layers = d.model.layers // d.pipeline_parallel
        window, full = -(-layers // 2), layers // 2 + DRAFTS.get(d.drafts or "", (0, 0))[1]
        few, many = sorted((window, full))
        size = many if many < 1.5 * few else few
        return cls(block_size, block_size * values * bytes_each * size, -(-full // size), -(-window // size))

    def blocks_of_request(self, length: int, in_flight: int) -> int:
        """Blocks that vLLM sets aside for a request of `length` tokens while `in_flight` are scheduled."""
        full = -(-length // self.block_size)
        window = -(-min(WINDOW - 1 + in_flight, length) // self.block_size) + 1
        return self.full_groups * full + self.window_groups * window

    def requests(self, gib: float, length: int, in_flight: int) -> float:
        """Requests of `length` tokens that fit at once."""
        blocks = int(gib * GIB // self.block_bytes)
        return blocks / self.blocks_of_request(length, in_flight)


@dataclass(frozen=True, slots=True)
class Overheads:
    """Memory of one GPU other than weights and cache.

    context: CUDA, libraries; token: bytes of activations a batched token; step: GiB that even a small step needs;
    logit: bytes of a logit with its copies in the sampler, a request; graph: GiB a captured size; ranks: communication,
    GiB, above one GPU.
    """

    context: float = 0.5
    token: int = 62 * 1024
    step: float = 0.8
    logit: int = 10
    graph: float = 0.012
    ranks: float = 1.4


OVERHEADS: Final = Overheads()


def activations(model: ModelSpec, tokens: int, requests: int) -> float:
    """GiB that the largest step needs: its activations, and the logits of every request."""
    step = max(tokens * OVERHEADS.token / GIB, OVERHEADS.step)
    return step + requests * model.vocabulary * OVERHEADS.logit / GIB


def captured(most: int) -> int:
    """How many graph sizes vLLM captures up to `most` tokens: 1, 2, 4, then by 8 to 256, then by 16."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)]
    return sum(size <= most for size in sizes)


@dataclass(frozen=True, slots=True)
class Start:
    """A start that we measured. layers: of the model, where not all; blocks: of 16 tokens in the KV cache, or GiB."""

    model: str
    device: str
    count: int
    experts: str
    results: str
    kv_gib: float
    load_peak_gib: float | None = None
    layers: int = 0
    tokens: int = 16_384
    requests: int = 32
    length: int = 704
    graphs: int = 6


MEASURED: Final = (
    Start("120b", "H200", 1, "gptoss", "decode-h200-120b-marlin-2026-11-22.json", 65.71, 79.78),
    Start("120b", "H200", 1, "triton", "decode-h200-120b-marlin-2026-11-22.json", 65.69, 79.78),
    Start("120b", "H200", 1, "marlin", "decode-h200-120b-marlin-2026-11-22.json", 60.41, 129.39),
    Start("120b", "H200", 1, "humming", "decode-h200-settings-2026-11-22.json", 62.07, 123.95, requests=64),
    Start("120b", "H200", 1, "gptoss", "decode-h200-settings-2026-11-22.json", 111.75, 31.05, layers=8, requests=64),
    Start("120b", "H200", 2, "gptoss", "decode-2xh200-120b-2026-11-22.json", 94.91, 41.08),
    Start("20b", "H200", 1, "gptoss", "decode-h200-2026-11-20.json", 113.86),
    Start("120b", "H100", 1, "gptoss", "decode-h100-120b-2026-11-24.json", 9.53, 64.94, requests=256, graphs=4),
    Start("120b", "H100", 1, "triton", "decode-h100-120b-2026-11-24.json", 9.54, 64.91, requests=256, graphs=4),
    Start("120b", "H100", 1, "gptoss", "decode-h100-120b-latency-2026-11-24.json", 10.01, 61.90, 0, 2048, 64, graphs=3),
    Start("120b", "H100", 1, "triton", "decode-h100-120b-latency-2026-11-24.json", 10.01, 71.36, 0, 2048, 64, graphs=3),
    Start("120b", "H100", 1, "gptoss", "decode-h100-120b-long-2026-11-24.json", 10.12, 61.90, 0, 2048, 2, 32_960, 2),
    Start("20b", "H100", 1, "gptoss", "decode-h100-2026-11-24.json", 57.77, 17.78, requests=256, graphs=4),
    Start("20b", "H100", 1, "triton", "decode-h100-2026-11-24.json", 57.80, 17.75, requests=256, graphs=4),
    Start(
        "20b", "H100", 1, "gptoss", "decode-h100-20b-evaluation-2026-11-24.json", 57.99, 17.78, 0, 16_384, 128, 704, 3
    ),
)
"""In-process engines with dummy weights, vLLM 0.33.0, utilisation 0.92."""


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def load_peak(start: Start | None, weights: Weights, layers: int) -> float:
    """GiB while weights are laid out: as measured, else all weights and two layers' experts once more."""
    if start is not None and start.load_peak_gib is not None:
        return start.load_peak_gib
    return weights.total + 2 * weights.experts / layers + OVERHEADS.context
