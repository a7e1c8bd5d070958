"""The sm90 kernel for many tokens, and the sparse ones for few each, against `benchmarks/reference.py` in float64."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import cases
from tests.gpu.cases import Kernels
from tests.gpu.marks import SM90
from vllm_gptoss.engine.kernels.experts_many import ManyTokenExperts, counters

pytestmark = SM90


@pytest.fixture(scope="module", params=cases.EXPERT_SHAPES, ids=str)
def layer(request: pytest.FixtureRequest) -> Kernels:
    return cases.kernels(*request.param)


@pytest.mark.parametrize("routed", cases.ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 33, 64, 128, 300, 512, 700, 1300, 2048])
def test_many_tokens_match_float64_and_repeat_bit_for_bit(layer: Kernels, tokens: int, routed: str) -> None:
    many = ManyTokenExperts(layer[0])
    cases.experts_by_routing(many, layer[1], layer[2], min(tokens, many.max_tokens), routed)


@pytest.mark.parametrize("routed", cases.ROUTINGS)
@pytest.mark.parametrize("tokens", [65, 128, 256])
def test_many_experts_with_few_tokens_each_match_float64(layer: Kernels, tokens: int, routed: str) -> None:
    if layer[0].max_tokens < tokens or layer[0].active > 4:
        pytest.skip("more tokens or choices than these kernels take")
    cases.experts_by_routing(layer[0], layer[1], layer[2], tokens, routed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_of_both_dtypes_choose_as_topk(layer: Kernels, dtype: torch.dtype) -> None:
    few, up, down = layer
    if few.active == cases.ACTIVE:
        cases.experts_by_logits(ManyTokenExperts(few), up, down, 200, dtype)


@pytest.mark.parametrize("tokens", [64, 256])
def test_an_expert_parallel_rank_sums_only_its_own(layer: Kernels, tokens: int) -> None:
    few, up, down = layer
    many = cases.experts_of_a_rank(ManyTokenExperts, up, down, tokens, few.active)
    nowhere = torch.zeros(tokens, few.active, dtype=torch.int32, device="cuda")
    none = cases.run_experts(many, cases.draw(tokens, down.blocks.shape[1]), nowhere, torch.ones_like(nowhere).float())
    assert not none.any(), "a rank that has no token's expert"


def test_a_graph_replays_on_new_inputs(layer: Kernels) -> None:
    cases.experts_in_a_graph(ManyTokenExperts(layer[0]), layer[1], layer[2], 70)
    assert not counters(0).any(), "a launch leaves its counters as they were"
