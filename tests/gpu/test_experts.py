"""The sm90 expert kernels against `benchmarks/reference.py` in float64, all shapes of 20b and 120b at TP 1, 2, 4, 8."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import cases
from tests.gpu.cases import ACTIVE, ALPHA, LIMIT, C, Weights
from tests.gpu.marks import SM90
from vllm_gptoss.engine.kernels import experts, experts_plan

pytestmark = SM90

Layer = tuple[int, Weights, Weights]


@pytest.fixture(
    scope="module",
    params=[(count, intermediate) for count in (32, 128) for intermediate in cases.INTERMEDIATE],
    ids=lambda shape: f"{shape[0]}x{shape[1]}",
)
def layer(request: pytest.FixtureRequest) -> Layer:
    count, intermediate = request.param
    torch.cuda.empty_cache()
    return count, *cases.layer(count, intermediate)


def prepared(layer: Layer) -> experts.FewTokenExperts:
    count, up, down = layer
    return experts.FewTokenExperts(up.projection, down.projection, ACTIVE, count, alpha=ALPHA, limit=LIMIT)


def taking(layer: Layer, tokens: int) -> experts.FewTokenExperts:
    """`prepared`, where it takes so many tokens."""
    module = prepared(layer)
    if module.max_tokens < tokens:
        pytest.skip(f"on this GPU these kernels take up to {module.max_tokens} tokens")
    return module


@pytest.mark.parametrize("skewed", [False, True], ids=["uniform", "skewed"])
def test_every_batch_matches_float64_and_repeats_bit_for_bit(layer: Layer, skewed: bool) -> None:
    module = prepared(layer)
    few = min(experts_plan.NARROW_TOKENS, torch.cuda.get_device_properties(0).multi_processor_count // 4)
    assert module.max_tokens == (few if few < experts_plan.NARROW_TOKENS else experts_plan.MAX_TOKENS)
    cases.experts(module, layer[1], layer[2], module.max_tokens, skewed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 8, 28, 64])
def test_logits_choose_and_weigh_as_topk_softmax(layer: Layer, tokens: int, dtype: torch.dtype) -> None:
    cases.experts_by_logits(taking(layer, tokens), layer[1], layer[2], tokens, dtype)


def test_a_block_whose_slots_do_not_fit_stages_them_one_after_another(layer: Layer) -> None:
    """Some experts have 17 tokens, all others one or two: more slots than blocks, of 120b."""
    (count, up, down), tokens = layer, 64
    module = taking(layer, tokens)
    ids = (torch.arange(tokens * ACTIVE, device="cuda").view(ACTIVE, tokens).T % (count - 5) + 5).contiguous()
    for busy in range(5):
        ids[busy * 11 : busy * 11 + 17, busy % ACTIVE] = busy
    x, weights = cases.draw(tokens, C), torch.rand(tokens, ACTIVE, device="cuda")
    wanted = cases.experts_oracle(x, ids, weights, up, down)
    cases.experts_close(cases.run_experts(module, x, ids.int(), weights), wanted)


@pytest.mark.parametrize("tokens", [8, 64])
def test_an_expert_parallel_rank_sums_only_its_own(layer: Layer, tokens: int) -> None:
    taking(layer, tokens)
    cases.experts_of_a_rank(lambda mapped: mapped, layer[1], layer[2], tokens)


def test_a_graph_replays_on_new_inputs(layer: Layer) -> None:
    cases.experts_in_a_graph(prepared(layer), layer[1], layer[2], 2)
