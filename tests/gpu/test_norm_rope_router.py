"""The kernels around the products of a decode step of many tokens against the float64 oracle, and a layer of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu import cases
from tests.gpu.cases import BLOCK, HEAD, PARALLEL, C, draw, poison
from tests.gpu.marks import SM90
from vllm_gptoss.engine.kernels import norm_rope_router
from vllm_gptoss.engine.kernels.experts_many import ManyTokenExperts
from vllm_gptoss.engine.kernels.layer import LayerTensors, Requests
from vllm_gptoss.engine.model import layer_upto16, layer_upto512

pytestmark = SM90
TOKENS = (1, 15, 16, 17, 33, 64, 100, 256, 512)


@pytest.mark.parametrize("hidden", [C, 2048, 8192])
@pytest.mark.parametrize("tokens", TOKENS)
def test_norm_of_every_token(tokens: int, hidden: int) -> None:
    cases.norm(norm_rope_router.norm, tokens, hidden)


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_rope_turns_queries_and_writes_the_cache(parallel: int, tokens: int, cache_dtype: torch.dtype) -> None:
    cases.rope(norm_rope_router.rope, parallel, tokens, cache_dtype)


@pytest.mark.parametrize("experts", [32, 64, 128])
@pytest.mark.parametrize("tokens", TOKENS)
def test_router_chooses_the_best_experts(experts: int, tokens: int) -> None:
    cases.router(norm_rope_router.router, experts, tokens)


def test_router_gives_a_tie_to_the_lower_id() -> None:
    tokens = 40
    x, weight, bias = draw(tokens, C), torch.zeros(32, C, device="cuda").bfloat16(), torch.zeros(32, device="cuda")
    bias[7] = 1.0
    normed, weights = poison(tokens, C), poison(tokens, 4, dtype=torch.float32)
    ids = torch.full((tokens, 4), -1, device="cuda", dtype=torch.int32)
    norm_rope_router.router(x, None, draw(C), weight, bias.bfloat16(), normed, weights, ids, 1e-5)
    assert ids.tolist() == [[7, 0, 1, 2]] * tokens


Step = tuple[list[LayerTensors], list[ManyTokenExperts], Tensor, Tensor, Requests, Tensor]


def a_step(tokens: int, layers: int, each: int = 1) -> Step:
    """Layers of a 20b, their experts, activations, cache, requests and positions; each: tokens of a request."""
    cos_sin = torch.randn(1024, HEAD, device="cuda")
    up, down = cases.layer(32, C)
    made = [cases.layer_tensors(up, down, cos_sin, window=0 if index % 2 else 128) for index in range(layers)]
    experts = [ManyTokenExperts(each.experts) for each in made if each.experts is not None]
    blocks, requests = 64, tokens // each
    cache = draw(requests * blocks, 8, BLOCK, 128)
    table = torch.randperm(requests * blocks, device="cuda").int().view(requests, blocks)
    lens = torch.randint(each, 1000, (requests,), device="cuda", dtype=torch.int32)
    return made, experts, draw(tokens, C), cache, *cases.decoding(table, lens, each)


@pytest.mark.parametrize("each", [1, 2, 4, 8])
def test_a_layer_is_what_the_chain_of_few_tokens_makes_of_it(each: int) -> None:
    """Compares up to the experts: near a tie, the products' rounding may change the chosen experts."""
    [layer], [experts], x, cache, requests, positions = a_step(16, 1, each)
    residual, other = draw(16, C), cache.clone()
    out, hidden = layer_upto512.layer(layer, experts, cache, requests, positions, x, residual)
    few, wanted = layer_upto16.layer(layer, other, requests, positions, x, residual)
    assert cases.error(hidden, wanted.double()) < 3 * cases.ROUNDING
    assert cases.error(cache, other.double()) < cases.ROUNDING
    alike = ((out.double() - few.double()).norm(dim=1) / few.double().norm(dim=1)) < 2**-6
    assert int(alike.sum()) >= 14


@pytest.mark.parametrize(
    ("tokens", "each"), [(17, 1), (32, 1), (100, 1), (256, 1), (512, 1), (32, 4), (64, 8), (128, 4), (510, 3), (512, 4)]
)
def test_a_chain_in_a_graph_equals_the_same_calls_one_by_one(
    tokens: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programmatic launches overlap inside a graph: a missing wait would show as a difference. A draft's keys are
    written in the step that reads them."""
    layers, experts, x, cache, requests, positions = a_step(tokens, 3, each)

    def run() -> tuple[Tensor, Tensor]:
        hidden, residual = x, None
        for layer, own in zip(layers, experts, strict=True):
            hidden, residual = layer_upto512.layer(layer, own, cache, requests, positions, hidden, residual)
        assert residual is not None
        return hidden, residual

    cases.alike_in_a_graph(run, monkeypatch)


@pytest.mark.parametrize(("tokens", "real", "each"), [(32, 19, 1), (64, 40, 1), (64, 40, 4), (32, 24, 8)])
def test_padding_writes_nothing_and_disturbs_nobody(tokens: int, real: int, each: int) -> None:
    """A captured graph may have more rows than the step has requests: slots of -1, tokens that no request has."""
    [layer], [experts], x, cache, requests, positions = a_step(tokens, 1, each)
    starts = requests.query_start.clamp(max=real)
    slots = torch.where(torch.arange(tokens, device="cuda") < real, requests.slots, -1)
    padded = Requests(requests.block_table, requests.seq_lens, starts, slots)
    before = cache.clone()
    out, hidden = layer_upto512.layer(layer, experts, cache, padded, positions, x, None)
    changed = (cache != before).flatten(2).any(-1).any(1)
    assert set(changed.nonzero().flatten().tolist()) <= set((slots[:real] // BLOCK).tolist())
    again = before.clone()
    count = real // each
    cut = Requests(requests.block_table[:count], requests.seq_lens[:count], starts[: count + 1], slots[:real])
    _, alone = layer_upto512.layer(layer, experts, again, cut, positions[:real], x[:real], None)
    assert cases.error(hidden[:real], alone.double()) < cases.ROUNDING
    assert bool(out.isfinite().all())
