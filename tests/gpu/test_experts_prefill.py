"""The sm90 kernels for large steps, against `benchmarks/reference.py` in float64."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import cases
from tests.gpu.cases import Kernels
from tests.gpu.marks import SM90
from vllm_gptoss.engine.kernels import experts
from vllm_gptoss.engine.kernels.experts_prefill import SLICE_TOKENS, PrefillExperts, state

pytestmark = SM90


@pytest.fixture(scope="module", params=cases.EXPERT_SHAPES, ids=str)
def layer(request: pytest.FixtureRequest) -> Kernels:
    return cases.kernels(*request.param)


def poison_memory(prefill: PrefillExperts, tokens: int) -> None:
    """Fills the memory of the workspace with NaN, which stays where no kernel writes."""
    torch.full((prefill.workspace_bytes(tokens) // 2,), float("nan"), dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("routed", cases.ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 600, 2100])
def test_large_steps_match_float64_and_repeat_bit_for_bit(layer: Kernels, tokens: int, routed: str) -> None:
    prefill = PrefillExperts(layer[0])
    poison_memory(prefill, tokens)
    cases.experts_by_routing(prefill, layer[1], layer[2], tokens, routed)


@pytest.mark.parametrize("tokens", [700, SLICE_TOKENS + 77])
def test_every_number_of_columns_is_right(layer: Kernels, tokens: int) -> None:
    """Experts of 0, 1, 2, … tokens, and of more than a chunk."""
    few, up, down = layer
    count = up.blocks.shape[0]
    weight = torch.arange(count, device="cuda").double() ** 2 + 1e-3
    ids = torch.multinomial(weight.expand(tokens, -1), few.active)
    x, weights = cases.draw(tokens, down.blocks.shape[1]), torch.rand(tokens, few.active, device="cuda")
    prefill = PrefillExperts(few)
    poison_memory(prefill, tokens)
    out = cases.run_experts(prefill, x, ids.int(), weights)
    wanted = cases.experts_oracle(x, ids, weights, up, down)
    cases.experts_close(out, wanted)
    assert ((out.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max() < 2**-7
    assert cases.same(out, cases.run_experts(prefill, x, ids, weights)), "ids of 64 bits"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_of_both_dtypes_choose_as_topk(layer: Kernels, dtype: torch.dtype) -> None:
    few, up, down = layer
    if few.active == cases.ACTIVE:
        cases.experts_by_logits(PrefillExperts(few), up, down, 600, dtype)


@pytest.mark.parametrize("tokens", [200, 1024])
def test_an_expert_parallel_rank_sums_only_its_own(layer: Kernels, tokens: int) -> None:
    def made(mapped: experts.FewTokenExperts) -> PrefillExperts:
        prefill = PrefillExperts(mapped)
        poison_memory(prefill, tokens)
        return prefill

    cases.experts_of_a_rank(made, layer[1], layer[2], tokens, layer[0].active)


def test_a_graph_replays_on_new_inputs(layer: Kernels) -> None:
    cases.experts_in_a_graph(PrefillExperts(layer[0]), layer[1], layer[2], 600)
    assert not state(0)[:4].any(), "a launch leaves its counter of blocks as it was"


def test_planted_faults_are_found(layer: Kernels) -> None:
    """A scale, a value and a bias of one expert changed: the case notices each."""
    few, up, down = layer
    x, logits = cases.draw(600, down.blocks.shape[1]), torch.randn(600, up.blocks.shape[0], device="cuda").bfloat16()
    prefill = PrefillExperts(few)
    right = cases.run_experts(prefill, x, logits, None)
    for tensor in (up.projection.scales, down.projection.values, up.projection.bias, down.projection.bias):
        kept = tensor[0, :64].clone()
        tensor[0, :64] += 3
        assert not cases.same(right, cases.run_experts(prefill, x, logits, None))
        tensor[0, :64] = kept
    assert cases.same(right, cases.run_experts(prefill, x, logits, None))
