"""Every rank's share: complete, disjoint, and what vLLM's own loader really loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint import tiny
from vllm_gptoss.checkpoint import shards
from vllm_gptoss.checkpoint.config import Config
from vllm_gptoss.checkpoint.names import Format, expected
from vllm_gptoss.checkpoint.shards import Layout, Rank

GPT_OSS_20B = tiny.Shape(24, 2880, 2880, 32, 4, 64, 8, 64, 201_088, 128, 131_072)
GPT_OSS_120B = tiny.Shape(36, 2880, 2880, 128, 4, 64, 8, 64, 201_088, 128, 131_072)
SMALL = tiny.Shape(4, 64, 2880, 8, 2, 64, 8, 64, 2000)
"""True head counts and intermediate size, whose division is the hard part; the rest small. 2000 rows need padding."""

SHAPES: dict[Format, tiny.Shape] = {"mxfp4": SMALL, "quark": SMALL, "bf16": replace(SMALL, intermediate=512)}
"""vLLM's BF16 experts for CPU do not take 720 rows, 2880 over four ranks."""

LAYOUTS = [
    Layout(tensor=2),
    Layout(tensor=4),
    Layout(tensor=8),
    Layout(tensor=8, expert=True),
    Layout(pipeline=3),
    Layout(tensor=2, pipeline=2),
    Layout(tensor=2, data=2),
    Layout(tensor=2, data=2, expert=True),
]
LOADED: dict[Format, list[Layout]] = {
    "mxfp4": LAYOUTS,
    "bf16": [Layout(tensor=4), Layout(tensor=4, expert=True), Layout(pipeline=2)],
    "quark": [Layout(tensor=4)],
}
"""What vLLM's loader is made to load."""


def config_of(shape: tiny.Shape, fmt: Format = "mxfp4") -> Config:
    return Config.from_json(tiny.config(shape, fmt))


def ranks(layout: Layout) -> list[Rank]:
    """In vLLM's order: data, then pipeline, then tensor, the last fastest."""
    sizes = (range(layout.data), range(layout.pipeline), range(layout.tensor))
    return [Rank(tensor=t, pipeline=p, data=d) for d, p, t in product(*sizes)]


# Arithmetic


def test_intermediate_of_2880_rounds_to_whole_groups() -> None:
    config = config_of(GPT_OSS_20B)
    shares = [shards.intermediate(config, Layout(8), Rank(r), "mxfp4") for r in range(8)]
    assert [len(s) for s in shares] == [384] * 7 + [192]
    assert [len(shards.intermediate(config, Layout(4), Rank(r), "mxfp4")) for r in range(4)] == [736] * 3 + [672]
    assert [len(shards.intermediate(config, Layout(8), Rank(r), "bf16")) for r in range(8)] == [360] * 8


def test_a_last_rank_may_get_no_rows() -> None:
    """288 = 9 groups over 4 ranks: three each, none for the last."""
    config = config_of(tiny.Shape(intermediate=288))
    assert [len(shards.intermediate(config, Layout(4), Rank(r), "mxfp4")) for r in range(4)] == [96, 96, 96, 0]


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"), [(24, 2, [12, 12]), (36, 5, [7, 7, 7, 8, 7]), (4, 3, [1, 2, 1])]
)
def test_pipeline_stages(layers: int, stages: int, sizes: list[int]) -> None:
    config = config_of(tiny.Shape(layers=layers))
    got = [shards.layers(config, Layout(pipeline=stages), stage) for stage in range(stages)]
    assert [len(r) for r in got] == sizes
    assert [i for r in got for i in r] == list(range(layers))


@pytest.mark.parametrize("fmt", ["mxfp4", "bf16", "quark"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_cover_every_tensor_exactly(layout: Layout, fmt: Format) -> None:
    """Counted in elements: shared tensors on every rank of their stage, divided ones once per copy."""
    config = config_of(SMALL, fmt)
    count: Counter[str] = Counter()
    for rank in ranks(layout):
        for name, indices in shards.owned(config, fmt, layout, rank).items():
            size = 1
            for axis in indices:
                size *= len(axis)
            count[name] += size
    for name, entry in expected(config, fmt).items():
        whole = 1
        for size in entry.options[0][0]:
            whole *= size
        if "experts" in name:
            down_bias = name.endswith(("down_proj_bias", "down_proj.bias"))
            copies = 1
            assert layout.expert or not down_bias or count[name] == whole, "the down bias is added once"
        else:
            divided = {"vocabulary", "query", "key", "heads"}.intersection(entry.axes)
            copies = layout.data * (1 if divided else layout.tensor) * (1 if ".layers." in name else layout.pipeline)
        assert count[name] == copies * whole, (name, layout)


@pytest.mark.parametrize("shape", [GPT_OSS_20B, GPT_OSS_120B])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_the_real_models_fit_every_recommended_layout(shape: tiny.Shape, tensor: int) -> None:
    config = config_of(shape)
    for layout in (Layout(tensor), Layout(tensor, expert=True), Layout(tensor, pipeline=2), Layout(tensor, data=2)):
        assert shards.problems(config, layout) == []


def test_bytes_of_the_whole_model() -> None:
    """The published checkpoints' sizes: 13.76 GB and 65.25 GB in safetensors."""
    sizes = [shards.bytes_owned(config_of(s), "mxfp4", Layout(), Rank()) for s in (GPT_OSS_20B, GPT_OSS_120B)]
    assert sizes == [13_761_264_768, 65_248_815_744]


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(tensor=3), "use 1, 2, 4, 8"),
        (Layout(tensor=16), "does not replicate them"),
        (Layout(data=7), "7 ranks do not divide the intermediate size"),
        (Layout(data=3, expert=True), "3 ranks do not divide 32 experts; use 1, 2, 4, 8, 16, 32"),
        (Layout(pipeline=30), "exceeds 24 layers"),
    ],
)
def test_a_layout_that_cannot_work_says_what_can(layout: Layout, says: str) -> None:
    assert says in "; ".join(shards.problems(config_of(GPT_OSS_20B), layout))


def test_quark_is_refused_where_vllm_cannot_load_it() -> None:
    config = config_of(SMALL, "quark")
    assert shards.problems(config, Layout(tensor=2), "quark") == []
    for layout in (Layout(pipeline=2), Layout(tensor=2, expert=True)):
        assert "use tensor parallelism" in "; ".join(shards.problems(config, layout, "quark"))


# vLLM's loader


def engine_args(layout: Layout) -> dict[str, Any]:
    out: dict[str, Any] = {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.pipeline}
    return out | {"data_parallel_size": layout.data, "enable_expert_parallel": layout.expert}


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Format, Path]:
    """All layouts loaded by vLLM, one subprocess per format: OUT/<layout>/<rank>.safetensors."""
    fmt: Format = request.param
    base = tmp_path_factory.mktemp(fmt)
    tiny.write(base / "model", SHAPES[fmt], fmt)
    command = [sys.executable, "-m", "tests.checkpoint.ranks", str(base / "model"), str(base)]
    environ = os.environ | {"VLLM_PLUGINS": "none", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    layouts = json.dumps([engine_args(layout) for layout in LOADED[fmt]])
    subprocess.run([*command, layouts], check=True, timeout=240, env=environ, cwd=Path(__file__).parents[2])
    return fmt, base


EXPERT_NAMES = {
    "gate_up_proj_blocks": "w13_weight",
    "gate_up_proj_scales": "w13_weight_scale",
    "gate_up_proj_bias": "w13_bias",
    "gate_up_proj": "w13_weight",
    "gate_up_proj.weight": "w13_weight",
    "gate_up_proj.weight_scale": "w13_weight_scale",
    "gate_up_proj.bias": "w13_bias",
}
EXPERT_NAMES |= {k.replace("gate_up", "down"): v.replace("w13", "w2") for k, v in EXPERT_NAMES.items()}


def parameters(fmt: Format, shares: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """The shares under vLLM's parameter names: q, k, v joined, blocks flat, BF16 experts [E, N, C], Quark's stacked."""
    out: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, tensor in shares.items():
        name = name.replace("self_attn", "attn").replace("embed_tokens", "embedding")
        head, _, tail = name.partition(".mlp.experts.")
        if not tail:
            out[name] = tensor
            continue
        if fmt == "quark":
            tail = tail.partition(".")[2]
        if fmt == "bf16" and not tail.endswith("bias"):
            tensor = tensor.mT
        if tail.endswith("_blocks"):
            tensor = tensor.flatten(-2)
        stacks.setdefault(f"{head}.mlp.experts.routed_experts.{EXPERT_NAMES[tail]}", []).append(tensor)
    for name, parts in stacks.items():
        out[name] = torch.stack(parts) if fmt == "quark" else parts[0]
        assert out[name].shape[0] == experts
    for name in [n for n in out if ".q_proj." in n]:
        parts = [out.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        out[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    return out


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("loaded", LOADED, indirect=True)
def test_every_rank_holds_what_vllm_loads(loaded: tuple[Format, Path]) -> None:
    fmt, base = loaded
    config, whole = config_of(SHAPES[fmt], fmt), tiny.tensors(SHAPES[fmt], fmt)
    for index, layout in enumerate(LOADED[fmt]):
        for number, rank in enumerate(ranks(layout)):
            owned = shards.owned(config, fmt, layout, rank)
            shares = {n: whole[n][tuple(slice(r.start, r.stop) for r in at)] for n, at in owned.items()}
            held = load_file(base / str(index) / f"{number}.safetensors")
            compare(parameters(fmt, shares, len(shards.experts(config, layout, rank))), held, f"{layout} {rank}")


def compare(want: dict[str, torch.Tensor], held: dict[str, torch.Tensor], where: str) -> None:
    """Each share in the corner of its parameter; only experts and the vocabulary may have room left, for padding."""
    for name, parameter in held.items():
        if name not in want:
            assert name.endswith(("w2_bias", "_scale")), (name, where)
            assert name.endswith("_scale") or not parameter.any(), f"the down bias is added once, {where}"
            continue
        share = want.pop(name)
        corner = parameter[tuple(slice(0, size) for size in share.shape)]
        assert torch.equal(corner, share.to(corner.dtype)), (name, where)
        room = parameter.numel() - share.numel()
        assert not room or "experts" in name or "embedding" in name or "lm_head" in name, (name, where)
    assert not want, f"vLLM has no such parameter, {where}"
