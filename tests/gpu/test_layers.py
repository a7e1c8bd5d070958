"""The kernels of a few-token step against the float64 oracle, on the GPU they are made for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu import cases
from tests.gpu.cases import BLOCK, HEAD, PARALLEL, C, draw, poison
from tests.gpu.marks import SM90
from vllm_gptoss.engine.kernels import attention, dense, nvrtc
from vllm_gptoss.engine.model import layer_upto16

pytestmark = SM90
TOKENS = range(1, dense.MAX_TOKENS + 1)


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_qkv_rope_writes_queries_and_cache(parallel: int, tokens: int, cache_dtype: torch.dtype) -> None:
    cases.qkv_rope(dense.qkv_rope, parallel, tokens, cache_dtype)


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("tokens", TOKENS)
def test_out_proj_adds_bias_and_residual(parallel: int, tokens: int) -> None:
    cases.out_proj(dense.out_proj, parallel, tokens)


@pytest.mark.parametrize("experts", [32, 128])
@pytest.mark.parametrize("tokens", TOKENS)
def test_router_chooses_the_best_experts(experts: int, tokens: int) -> None:
    cases.router(dense.router, experts, tokens)


def test_router_gives_a_tie_to_the_lower_id() -> None:
    x, norm_weight = draw(1, C), draw(C)
    weight, bias = torch.zeros(32, C, device="cuda").bfloat16(), torch.zeros(32, device="cuda").bfloat16()
    bias[7] = 1.0
    normed, weights = poison(1, C), poison(1, 4, dtype=torch.float32)
    ids = torch.full((1, 4), -1, device="cuda", dtype=torch.int32)
    dense.router(x, None, norm_weight, weight, bias, normed, weights, ids, 1e-5)
    assert ids.tolist() == [[7, 0, 1, 2]]


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize(("lengths", "queries"), cases.BATCHES)
@pytest.mark.parametrize("strided", [False, True])
def test_attention_with_sinks(
    window: int, parallel: int, lengths: list[int], queries: list[int], strided: bool
) -> None:
    cases.attention(attention.attend, 8 // parallel, window, lengths, queries, strided)


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize(("lengths", "queries"), cases.LONG_BATCHES)
def test_attention_with_long_contexts(parallel: int, lengths: list[int], queries: list[int]) -> None:
    cases.attention(attention.attend, 8 // parallel, 0, lengths, queries, strided=parallel == 1)


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize(
    "steps",
    [
        ([19_999], [576], [3_071], [3_072], [1]),
        ([19_000, 100, 100, 100], [576] * 4, [5, 0, 0, 0], [100, 19_000, 18_000, 0], [20_000] * 4),
        ([19_000] + [100] * 15, [576] * 16, [100] * 15 + [19_999], [7_000] * 8 + [0] * 8, [20_000] * 16),
    ],
    ids=lambda steps: str(len(steps[0])),
)
def test_a_graph_serves_lengths_that_it_was_not_captured_with(steps: tuple[list[int], ...], kv_heads: int) -> None:
    cases.attention_in_a_graph(attention.attend, kv_heads, 0, steps)


PIECES = {
    "a piece is left out": ("from + n * SHARES < s.pieces ?", "from + n * SHARES < s.pieces - 1 ?"),
    "a piece is taken twice": ("s.piece = 1 + of_request % each;", "s.piece = 1;"),
}


@pytest.mark.parametrize("fault", PIECES)
def test_a_planted_fault_of_pieces_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, (there, instead) = nvrtc.source(attention.SOURCE), PIECES[fault]
    assert whole.count(there) == 1
    monkeypatch.setattr(nvrtc, "source", lambda path: whole.replace(there, instead))
    monkeypatch.setattr(attention, "kernel", attention.kernel.__wrapped__)
    with pytest.raises(AssertionError):
        cases.attention(attention.attend, 8, 0, [30_000, 200], [1, 1], strided=False)


def test_a_chain_in_a_graph_equals_the_same_calls_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programmatic launches overlap inside a graph: a missing wait would show as a difference."""
    tokens = 4
    x, cos_sin = draw(tokens, C), torch.randn(1024, HEAD, device="cuda")
    up, down = cases.layer(32, C)
    layers = [cases.layer_tensors(up, down, cos_sin, window=0 if index % 2 else 128) for index in range(4)]
    cache = draw(256, 8, BLOCK, 128)
    table = torch.arange(256, device="cuda", dtype=torch.int32).view(tokens, 64)
    lens = torch.tensor([5, 700, 128, 1000], device="cuda", dtype=torch.int32)
    requests, positions = cases.decoding(table, lens)

    def run() -> tuple[Tensor]:
        hidden, residual = x, None
        for layer in layers:
            hidden, residual = layer_upto16.layer(layer, cache, requests, positions, hidden, residual)
        return (hidden,)

    cases.alike_in_a_graph(run, monkeypatch)
