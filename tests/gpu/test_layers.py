"""The kernels of a few-token step against the float64 oracle, on the GPU they are made for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu import cases
from tests.gpu.cases import BLOCK, HEAD, PARALLEL, C, draw, poison
from tests.gpu.marks import SM90
from vllm_gptoss.engine.kernels import attention, dense
from vllm_gptoss.engine.model import chain

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
            hidden, residual = chain.layer(layer, cache, requests, positions, hidden, residual)
        return (hidden,)

    cases.alike_in_a_graph(run, monkeypatch)
