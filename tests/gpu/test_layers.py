"""The kernels of a few-token step against the float64 oracle, on the GPU they are made for.

Outputs are poisoned with NaN and inputs drawn anew, so an element that is not written, or that is read from where it
should not be, shows. Tolerances: bf16 has 8 bits of mantissa, so one rounding is 2^-9 = 2.0e-3 of a value at most and
about 1.7e-3 in norm; a result that went through r roundings stays below r times that.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm_gptoss import reference
from vllm_gptoss.kernels import attention, dense

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("these kernels are made for sm_90", allow_module_level=True)

ROUNDING = 1.7e-3
C, HEAD, BLOCK = 2880, 64, 16
TOKENS = (1, 2, 7, 8, 9, 16)
PARALLEL = (1, 2, 4, 8)


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def poison(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, float("nan"), device="cuda", dtype=dtype)


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return reference.rms_norm(x.double(), weight.double())


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    cos, sin = cos_sin[positions].double().chunk(2, dim=-1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos[:, None] - high * sin[:, None], high * cos[:, None] + low * sin[:, None]], dim=-1)


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_qkv_rope_writes_queries_and_cache(parallel: int, tokens: int, cache_dtype: torch.dtype) -> None:
    heads, kv_heads = 64 // parallel, 8 // parallel
    rows = (heads + 2 * kv_heads) * HEAD
    x, residual, weight = draw(tokens, C), draw(tokens, C), draw(rows, C, scale=C**-0.5)
    norm_weight, bias = draw(C), draw(rows)
    cos_sin = torch.randn(4096, HEAD, device="cuda").to(cache_dtype)
    positions = torch.randint(0, 4096, (tokens,), device="cuda")
    slots = torch.randperm(64 * BLOCK, device="cuda")[:tokens]
    if tokens > 1:
        slots[1] = -1
    q, summed, cache = poison(tokens, heads * HEAD), poison(tokens, C), poison(64, kv_heads, BLOCK, 2 * HEAD)
    dense.qkv_rope(x, residual, norm_weight, weight, bias, positions, cos_sin, slots, cache, q, summed, 1e-5)

    wanted_sum = (x.float() + residual.float()).bfloat16()
    assert torch.equal(summed, wanted_sum)
    product = norm(wanted_sum, norm_weight) @ weight.double().T + bias.double()
    wq, wk, wv = product.split([heads * HEAD, kv_heads * HEAD, kv_heads * HEAD], dim=-1)
    wq, wk = (rotate(t.unflatten(-1, (-1, HEAD)), cos_sin, positions) for t in (wq, wk))
    assert error(q, wq.flatten(1)) < 3 * ROUNDING
    written = slots >= 0
    at = slots[written]
    assert error(cache[at // BLOCK, :, at % BLOCK, :HEAD], wk[written]) < 3 * ROUNDING
    assert error(cache[at // BLOCK, :, at % BLOCK, HEAD:], wv.unflatten(-1, (-1, HEAD))[written]) < 2 * ROUNDING
    assert int((~cache.isnan()).any(-1).sum()) == len(at) * kv_heads, "a slot that is no token's was written"


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("tokens", TOKENS)
def test_out_proj_adds_bias_and_residual(parallel: int, tokens: int) -> None:
    columns = 4096 // parallel
    x, weight, bias = draw(tokens, columns), draw(C, columns, scale=columns**-0.5), draw(C)
    residual = draw(tokens, C)
    for use_bias, use_residual in ((True, True), (True, False), (False, False)):
        out = poison(tokens, C)
        dense.out_proj(x, weight, bias if use_bias else None, residual if use_residual else None, out)
        wanted = x.double() @ weight.double().T + use_bias * bias.double() + use_residual * residual.double()
        assert error(out, wanted) < 2 * ROUNDING


@pytest.mark.parametrize("experts", [32, 128])
@pytest.mark.parametrize("tokens", TOKENS)
def test_router_chooses_the_best_experts(experts: int, tokens: int) -> None:
    x, residual, norm_weight = draw(tokens, C), draw(tokens, C), draw(C)
    weight, bias = draw(experts, C, scale=C**-0.5), draw(experts)
    normed, summed = poison(tokens, C), poison(tokens, C)
    weights, logits = poison(tokens, 4, dtype=torch.float32), poison(tokens, experts, dtype=torch.float32)
    ids = torch.full((tokens, 4), -1, device="cuda", dtype=torch.int32)
    dense.router(x, residual, norm_weight, weight, bias, normed, weights, ids, 1e-5, summed, logits)

    wanted_sum = (x.float() + residual.float()).bfloat16()
    wanted = norm(wanted_sum, norm_weight)
    assert torch.equal(summed, wanted_sum)
    assert error(normed, wanted) < 2 * ROUNDING
    assert error(logits, wanted @ weight.double().T + bias.double()) < ROUNDING
    best, best_ids = logits.double().topk(4, dim=-1)
    assert torch.equal(ids.long(), best_ids)
    # fast exp and division: 2 ulp each of float32
    torch.testing.assert_close(weights.double(), best.softmax(-1), rtol=1e-6, atol=0)


def test_router_gives_a_tie_to_the_lower_id() -> None:
    x, norm_weight = draw(1, C), draw(C)
    weight, bias = torch.zeros(32, C, device="cuda").bfloat16(), torch.zeros(32, device="cuda").bfloat16()
    bias[7] = 1.0
    normed, weights = poison(1, C), poison(1, 4, dtype=torch.float32)
    ids = torch.full((1, 4), -1, device="cuda", dtype=torch.int32)
    dense.router(x, None, norm_weight, weight, bias, normed, weights, ids, 1e-5)
    assert ids.tolist() == [[7, 0, 1, 2]]


BATCHES = (
    ([1], [1]),
    ([640], [1]),
    ([5, 130, 128, 129, 1000], [1, 4, 1, 2, 3]),
    ([2000, 37], [1, 1]),
    ([0, 50], [0, 1]),
    ([40] * 40, [1] * 15 + [0] * 25),
)


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("kv_heads", [8, 1])
@pytest.mark.parametrize(("lengths", "queries"), BATCHES)
@pytest.mark.parametrize("strided", [False, True])
def test_attention_with_sinks(
    window: int, kv_heads: int, lengths: list[int], queries: list[int], strided: bool
) -> None:
    heads, requests, tokens = kv_heads * 8, len(lengths), sum(queries) + 1  # the last token is padding
    blocks = 512
    cache = draw(blocks, BLOCK, kv_heads, 128).transpose(1, 2) if strided else draw(blocks, kv_heads, BLOCK, 128)
    width = max(lengths) // BLOCK + 2
    table = torch.randint(0, blocks, (requests, width), device="cuda", dtype=torch.int32)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], device="cuda", dtype=torch.int32)
    q, sinks, out = draw(tokens, heads * HEAD, scale=2.0), draw(heads), poison(tokens, heads * HEAD)
    lens = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    attention.attend(q, cache, sinks, table, lens, starts, out, HEAD**-0.5, window)

    wanted = torch.zeros(tokens, heads, HEAD, device="cuda", dtype=torch.float64)
    for request, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        if not count:
            continue
        position = torch.arange(length, device="cuda")
        rows = cache[table[request, position // BLOCK].long(), :, position % BLOCK].double()
        mine = slice(int(starts[request]), int(starts[request]) + count)
        wanted[mine] = _attend(q[mine], rows, sinks, window)
    # probabilities and the output are rounded once each
    assert error(out, wanted.flatten(1)) < 2 * ROUNDING
    assert not out[-1].any()


def _attend(q: Tensor, rows: Tensor, sinks: Tensor, window: int) -> Tensor:
    heads = sinks.shape[0]
    got = reference.sink_attention(
        q.double().unflatten(-1, (heads, HEAD)),
        rows[..., :HEAD],
        rows[..., HEAD:],
        sinks.double(),
        window=window or None,
    )
    return got.reshape(q.shape[0], heads, HEAD)


def test_runs_repeat_to_the_bit() -> None:
    x, weight, bias, residual = draw(8, 4096), draw(C, 4096, scale=1 / 64), draw(C), draw(8, C)
    first, second = poison(8, C), poison(8, C)
    dense.out_proj(x, weight, bias, residual, first)
    dense.out_proj(x, weight, bias, residual, second)
    assert torch.equal(first, second)


def test_a_chain_in_a_graph_equals_the_same_calls_one_by_one() -> None:
    """Programmatic launches overlap inside a graph: a missing wait would show as a difference."""
    tokens = 4
    x, norm_weight = draw(tokens, C), draw(C)
    layers = [
        (
            draw(5120, C, scale=C**-0.5),
            draw(5120),
            draw(C, 4096, scale=1 / 64),
            draw(C),
            draw(64),
            draw(32, C),
            draw(32),
        )
        for _ in range(4)
    ]
    cos_sin = torch.randn(1024, HEAD, device="cuda")
    cache = draw(256, 8, BLOCK, 128)
    table = torch.arange(256, device="cuda", dtype=torch.int32).view(tokens, 64)
    lens = torch.tensor([5, 700, 128, 1000], device="cuda", dtype=torch.int32)
    starts = torch.arange(tokens + 1, device="cuda", dtype=torch.int32)
    positions = (lens - 1).long()
    slots = table[torch.arange(tokens, device="cuda"), positions // BLOCK].long() * BLOCK + positions % BLOCK

    def run(synchronise: bool) -> Tensor:
        wait = torch.cuda.synchronize if synchronise else lambda: None
        hidden, residual = x, None
        for index, (qkv, qkv_bias, out_weight, out_bias, sinks, gate, gate_bias) in enumerate(layers):
            q, attended, after, normed = (poison(tokens, width) for width in (4096, 4096, C, C))
            summed = None if residual is None else poison(tokens, C)
            dense.qkv_rope(
                hidden, residual, norm_weight, qkv, qkv_bias, positions, cos_sin, slots, cache, q, summed, 1e-5
            )
            wait()
            attention.attend(q, cache, sinks, table, lens, starts, attended, 0.125, 0 if index % 2 else 128)
            wait()
            dense.out_proj(attended, out_weight, out_bias, hidden if summed is None else summed, after)
            wait()
            weights = poison(tokens, 4, dtype=torch.float32)
            ids = torch.zeros(tokens, 4, device="cuda", dtype=torch.int32)
            dense.router(after, None, norm_weight, gate, gate_bias, normed, weights, ids, 1e-5)
            wait()
            hidden, residual = normed, after
        return hidden

    wanted = run(synchronise=True).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(synchronise=False)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, wanted)
