"""Which part of every tensor each rank holds, under tensor, expert, pipeline and data parallelism.

The arithmetic of vLLM 0.32 and 0.33 restated over the axes of `names`: `GptOssModel._load_weights_*` (experts, sinks),
`QKVParallelLinear` and `RowParallelLinear`, `VocabParallelEmbedding`, `get_pp_indices`. Tests compare every rank with
what vLLM's own loader puts there. Used to say beforehand whether a layout works and what it costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_gptoss import spec
from vllm_gptoss.checkpoint.config import Config
from vllm_gptoss.checkpoint.names import Format, axis_sizes, expected

VOCABULARY_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before dividing it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel groups. `expert`: experts are spread whole over tensor x data ranks, not cut in rows."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def expert_ranks(self) -> int:
        """Ranks that share a layer's experts, whole or in rows."""
        return self.tensor * self.data


@dataclass(frozen=True, slots=True)
class Rank:
    """One process: its place in each group."""

    tensor: int = 0
    pipeline: int = 0
    data: int = 0


def problems(config: Config, layout: Layout, fmt: Format = "mxfp4") -> list[str]:
    """Why vLLM cannot run this layout, each with what can; empty if it can."""
    tensor, experts, out = layout.tensor, layout.expert_ranks, []
    if config.query_heads % tensor or config.kv_heads % tensor:
        fits = [n for n in range(1, config.kv_heads + 1) if not (config.kv_heads % n or config.query_heads % n)]
        out.append(
            f"tensor parallel {tensor} does not divide {config.query_heads} query and {config.kv_heads} key/value "
            f"heads (vLLM's gpt-oss does not replicate them); use {_listed(fits)}"
        )
    if VOCABULARY_PADDING * math.ceil(config.vocabulary / VOCABULARY_PADDING) % tensor:
        out.append(f"tensor parallel {tensor} does not divide the vocabulary padded to a multiple of 64")
    if config.intermediate % layout.world:
        out.append(f"{layout.world} ranks do not divide the intermediate size {config.intermediate}")
    if layout.expert and config.experts % experts:
        fits = [n for n in range(1, config.experts + 1) if config.experts % n == 0]
        out.append(f"{experts} ranks do not divide {config.experts} experts; use {_listed(fits)}")
    if layout.pipeline > config.layers:
        out.append(f"pipeline parallel {layout.pipeline} exceeds {config.layers} layers")
    # `_load_weights_quark` of 0.32 and 0.33 asks layer 0 on every stage, and cuts one expert's rows like a stack's.
    if fmt == "quark" and layout.pipeline > 1:
        out.append("vLLM cannot load Quark's gpt-oss with pipeline parallelism; use tensor parallelism")
    if fmt == "quark" and layout.expert and experts > 1:
        out.append("vLLM cannot load Quark's gpt-oss with expert parallelism; use tensor parallelism")
    return out


def layers(config: Config, layout: Layout, stage: int) -> range:
    """Layers of a pipeline stage. A remainder goes one each to the stages before the last, counted from its side."""
    sizes = [config.layers // layout.pipeline] * layout.pipeline
    for i in range(2, config.layers % layout.pipeline + 2):
        sizes[-i] += 1
    start = sum(sizes[:stage])
    return range(start, start + sizes[stage])


def query_heads(config: Config, layout: Layout, rank: Rank) -> range:
    """Query heads, and with them sinks and columns of the output projection."""
    return _nth(rank.tensor, config.query_heads // layout.tensor, config.query_heads)


def kv_heads(config: Config, layout: Layout, rank: Rank) -> range:
    """Key/value heads, as many as the rank's query heads need."""
    return _nth(rank.tensor, config.kv_heads // layout.tensor, config.kv_heads)


def vocabulary(config: Config, layout: Layout, rank: Rank) -> range:
    """Rows of the embedding and the head; the last rank may have fewer, padded with zeros."""
    padded = VOCABULARY_PADDING * math.ceil(config.vocabulary / VOCABULARY_PADDING)
    return _nth(rank.tensor, padded // layout.tensor, config.vocabulary)


def experts(config: Config, layout: Layout, rank: Rank) -> range:
    """Experts held, whole or in part."""
    if not layout.expert:
        return range(config.experts)
    return _nth(expert_rank(layout, rank), config.experts // layout.expert_ranks, config.experts)


def intermediate(config: Config, layout: Layout, rank: Rank, fmt: Format) -> range:
    """Gate/up pairs and columns of down. MXFP4 rounds each rank's share up to whole groups of 32, so with 8 ranks
    2880 splits into seven times 384 and 192, and a last rank may get nothing."""
    if layout.expert:
        return range(config.intermediate)
    group = 1 if fmt == "bf16" else spec.MXFP4_GROUP
    share = group * math.ceil(config.intermediate // group / layout.expert_ranks)
    return _nth(expert_rank(layout, rank), share, config.intermediate)


def expert_rank(layout: Layout, rank: Rank) -> int:
    """Place among the ranks that share a layer's experts."""
    return rank.data * layout.tensor + rank.tensor


def owned(config: Config, fmt: Format, layout: Layout, rank: Rank) -> dict[str, tuple[range, ...]]:
    """Per tensor the rank reads from the checkpoint, its indices along each axis. Absent names are not read.

    Every pipeline stage holds embedding, head and norm: vLLM's gpt-oss makes them without asking for its stage.
    The down bias is added once: without expert parallelism only the first of the ranks sharing the experts reads it.
    """
    axes = _axis_ranges(config, fmt, layout, rank)
    stage, out = layers(config, layout, rank.pipeline), {}
    for name, entry in expected(config, fmt).items():
        if name.startswith("model.layers.") and int(name.split(".")[2]) not in stage:
            continue
        if _is_down_bias(name) and not layout.expert and expert_rank(layout, rank):
            continue
        expert = _expert_of(name)
        if expert is not None and expert not in axes["experts"]:
            continue
        out[name] = tuple(axes[axis] for axis in entry.axes)
    return out


def bytes_owned(config: Config, fmt: Format, layout: Layout, rank: Rank) -> int:
    """Bytes of the checkpoint that the rank keeps, before any kernel's padding. Floats count as BF16."""
    table = expected(config, fmt)
    total = 0
    for name, ranges in owned(config, fmt, layout, rank).items():
        width = 1 if table[name].options[0][1] == {"U8"} else 2
        total += width * math.prod(len(r) for r in ranges)
    return total


def _axis_ranges(config: Config, fmt: Format, layout: Layout, rank: Rank) -> dict[str, range]:
    whole = {axis: range(size) for axis, size in axis_sizes(config).items()}
    heads, inner = query_heads(config, layout, rank), intermediate(config, layout, rank, fmt)
    group = spec.MXFP4_GROUP
    return whole | {
        "vocabulary": vocabulary(config, layout, rank),
        "heads": heads,
        "query": _times(heads, config.head_size),
        "key": _times(kv_heads(config, layout, rank), config.head_size),
        "experts": experts(config, layout, rank),
        "gate_up": _times(inner, 2),
        "intermediate": inner,
        "intermediate_groups": range(inner.start // group, inner.stop // group),
        "intermediate_bytes": range(inner.start // 2, inner.stop // 2),
    }


def _expert_of(name: str) -> int | None:
    part = name.partition(".experts.")[2].partition(".")[0]
    return int(part) if part.isdigit() else None


def _is_down_bias(name: str) -> bool:
    return name.endswith(("down_proj_bias", "down_proj.bias"))


def _nth(n: int, share: int, size: int) -> range:
    """The n-th run of `share` indices, cut at `size`."""
    return range(min(n * share, size), min((n + 1) * share, size))


def _times(indices: range, factor: int) -> range:
    return range(indices.start * factor, indices.stop * factor)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
