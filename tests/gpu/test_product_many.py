"""The products of a decode step of 17 to 32 tokens against float64, and the kernels that lay their activations out."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import cases
from tests.gpu.cases import BLOCK, DEVICE, HEAD, PARALLEL, C, draw, poison, same
from tests.gpu.marks import SM90
from vllm_gptoss.engine.kernels import attention_many, norm_rope_router, product_many

pytestmark = SM90
QKV, OUT = (5120, C), (C, 4096)


@pytest.mark.parametrize("tokens", [1, 7, 8, 17, 24, 31, 32])
@pytest.mark.parametrize("shape", [QKV, OUT, (2888, 2048), (8, 128), (1024, 5120)], ids=str)
def test_product_of_every_token(shape: tuple[int, int], tokens: int) -> None:
    cases.product(product_many.product, *shape, tokens)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_product_of_a_rank_that_adds_no_bias(parallel: int) -> None:
    cases.product(product_many.product, C, OUT[1] // parallel, 31, biased=False)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("tokens", [1, 17, 31, 32])
@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_rotated_product_is_the_product_and_rope(
    parallel: int, tokens: int, cache_dtype: torch.dtype, strided: bool
) -> None:
    apart = (product_many.product, norm_rope_router.rope)
    cases.rotated(product_many.rotated, apart, parallel, tokens, cache_dtype, strided)


def test_more_tokens_than_a_block_holds_are_refused() -> None:
    x = cases.tile(draw(33, C))
    given = (x, draw(*QKV), draw(QKV[0]), poison(33, QKV[0]))
    with pytest.raises(ValueError, match="1 to 32 tokens, got 33"):
        product_many.product(*given)
    positions, cos_sin = torch.arange(33, device=DEVICE), torch.randn(64, HEAD, device=DEVICE)
    with pytest.raises(ValueError, match="1 to 32 tokens, got 33"):
        product_many.rotated(*given, positions, cos_sin, positions, poison(4, 8, BLOCK, 2 * HEAD))


@pytest.mark.parametrize("tokens", [1, 17, 32])
def test_norm_lays_out_what_it_would_write(tokens: int) -> None:
    x, residual, weight, plain = draw(tokens, C), draw(tokens, C), draw(C), poison(tokens, C)
    tiled = product_many.tiled(x, C).fill_(float("nan"))
    norm_rope_router.norm(x, residual, weight, plain, None, cases.EPS)
    norm_rope_router.norm(x, residual, weight, tiled, None, cases.EPS, tiled.shape[1])
    assert same(tiled, cases.tile(plain))


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("lengths", [[1, 128, 129, 576] * 5, [9000, 2500, *[100] * 20]], ids=["whole", "split"])
def test_attention_lays_out_what_it_would_write(lengths: list[int], window: int) -> None:
    tokens, blocks = len(lengths), 512
    cache, q, sinks = draw(blocks, 8, BLOCK, 2 * HEAD), draw(tokens, 64, HEAD, scale=2.0), draw(64)
    table = torch.randint(0, blocks, (tokens, max(lengths) // BLOCK + 2), device=DEVICE, dtype=torch.int32)
    lens = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)
    starts = torch.arange(tokens + 1, device=DEVICE, dtype=torch.int32)
    plain, tiled = poison(tokens, 64 * HEAD), product_many.tiled(q, 64 * HEAD).fill_(float("nan"))
    given = (q.flatten(1), cache, sinks, table, lens, starts)
    attention_many.attend(*given, plain, HEAD**-0.5, window)
    attention_many.attend(*given, tiled, HEAD**-0.5, window, padded=tiled.shape[1])
    assert same(tiled, cases.tile(plain))


def test_products_one_after_another_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each starts while the one before ends, and reads what that one wrote once it is laid out."""
    x, norm = draw(32, C), draw(C)
    positions, cos_sin = torch.arange(32, device=DEVICE), torch.randn(64, HEAD, device=DEVICE)
    weights = [(draw(*QKV, scale=C**-0.5), draw(QKV[0])) for _ in range(3)]

    def run() -> tuple[torch.Tensor, ...]:
        hidden, outs = x, []
        for weight, bias in weights:
            tiled, out, queries = product_many.tiled(hidden, C), *(hidden.new_empty((32, QKV[0])) for _ in range(2))
            cache = hidden.new_zeros((4, 8, BLOCK, 2 * HEAD))
            norm_rope_router.norm(hidden, None, norm, tiled, None, cases.EPS, tiled.shape[1])
            product_many.product(tiled, weight, bias, out)
            product_many.rotated(tiled, weight, bias, queries, positions, cos_sin, positions, cache)
            hidden = queries[:, :C].contiguous()
            outs += [out, hidden, cache]
        return tuple(outs)

    cases.alike_in_a_graph(run, monkeypatch)
