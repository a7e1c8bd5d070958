"""The sm90 kernel for many tokens, and the sparse ones for few each, against `engine/reference.py` in float64."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import cases
from tests.gpu.cases import ALPHA, LIMIT, Kernels
from tests.gpu.marks import SM90
from vllm_gptoss.engine.kernels import experts
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
    count = up.blocks.shape[0]
    mapping = torch.full((2 * count,), -1, dtype=torch.int32, device="cuda")
    mapping[count:] = torch.arange(count, dtype=torch.int32, device="cuda")
    mapped = experts.FewTokenExperts(
        up.projection, down.projection, few.active, 2 * count, alpha=ALPHA, limit=LIMIT, expert_map=mapping
    )
    x = cases.draw(tokens, down.blocks.shape[1])
    ids = torch.stack([torch.randperm(2 * count, device="cuda")[: few.active] for _ in range(tokens)])
    ids[0] = torch.arange(few.active)  # a token with no expert here
    weights = torch.rand(tokens, few.active, device="cuda")
    out = cases.run_experts(ManyTokenExperts(mapped), x, ids.int(), weights)
    cases.experts_close(out, cases.experts_oracle(x, mapping[ids].long(), weights, up, down))
    assert not out[0].any()
    none = cases.run_experts(ManyTokenExperts(mapped), x, torch.zeros_like(ids).int(), weights)
    assert not none.any(), "a rank that has no token's expert"


def test_a_graph_replays_on_new_inputs(layer: Kernels) -> None:
    many = ManyTokenExperts(layer[0])
    x = cases.draw(70, layer[2].blocks.shape[1])
    logits = torch.randn(70, layer[1].blocks.shape[0], device="cuda").bfloat16()
    out = torch.empty_like(x)
    many(x, logits, None, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            many(x, logits, None, out)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        logits.copy_(torch.randn_like(logits))
        wanted = cases.run_experts(many, x, logits, None)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert cases.same(out, wanted)
    assert not counters(0).any(), "a launch leaves its counters as they were"
