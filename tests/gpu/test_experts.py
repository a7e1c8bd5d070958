"""The sm90 expert kernels against float64 on fresh random inputs with poisoned outputs."""

from __future__ import annotations

import pytest
import torch

from vllm_gptoss.kernels import experts, mxfp4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs an sm90 GPU (H100, H200)",
    ),
]

HIDDEN, ACTIVE = 2880, 4
ALPHA, LIMIT = 1.702, 7.0
Weights = tuple[torch.Tensor, torch.Tensor, experts.Projection]


def make(count: int, rows: int, columns: int, seed: int) -> Weights:
    g = torch.Generator(device="cuda").manual_seed(seed)
    blocks = torch.randint(0, 256, (count, rows, columns // 2), dtype=torch.uint8, device="cuda", generator=g)
    scales = torch.randint(113, 122, (count, rows, columns // 32), dtype=torch.uint8, device="cuda", generator=g)
    bias = torch.randn(count, rows, device="cuda", generator=g).bfloat16().float()
    values = torch.cat([mxfp4.hopper_values(blocks[e : e + 1]) for e in range(count)])
    return blocks, scales, experts.Projection(values, mxfp4.hopper_scales(scales), bias)


def reference(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: Weights, down: Weights) -> torch.Tensor:
    out = torch.zeros(x.shape[0], HIDDEN, dtype=torch.float64, device="cuda")
    for e in ids.unique().tolist():
        if e < 0:
            continue
        t, a = (ids == e).nonzero(as_tuple=True)
        h = x[t].double() @ mxfp4.dequantize(up[0][e], up[1][e], torch.float64).T + up[2].bias[e].double()
        gate, linear = h[:, ::2].clamp(max=LIMIT), h[:, 1::2].clamp(-LIMIT, LIMIT)
        h = (gate * torch.sigmoid(ALPHA * gate) * (linear + 1)).bfloat16().double()
        y = h @ mxfp4.dequantize(down[0][e], down[1][e], torch.float64).T + down[2].bias[e].double()
        out.index_add_(0, t, y * weights[t, a, None].double())
    return out


def run(
    module: experts.FewTokenExperts, x: torch.Tensor, routing: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    out = torch.full((x.shape[0], HIDDEN), float("nan"), dtype=torch.bfloat16, device="cuda")
    module(x, routing, weights, out)
    torch.cuda.synchronize()
    return out


def close(out: torch.Tensor, wanted: torch.Tensor) -> None:
    # bfloat16 rounds the output by at most 2^-9 of each value; an activation that lands on the other side of a
    # rounding boundary moves it by as much again, rarely. float32 accumulation is far below.
    error = ((out.double() - wanted).norm() / wanted.norm()).item()
    assert error < 2**-8


@pytest.fixture(scope="module", params=[(32, 2880), (32, 1472), (32, 768), (32, 384), (128, 768)])
def layer(request: pytest.FixtureRequest) -> tuple[int, Weights, Weights]:
    count, intermediate = request.param
    return count, make(count, 2 * intermediate, HIDDEN, 1), make(count, HIDDEN, intermediate, 2)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8, 9, 16, 31, 32])
@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_every_batch_matches_float64_and_repeats_bit_for_bit(
    layer: tuple[int, Weights, Weights], tokens: int, routing: str
) -> None:
    count, up, down = layer
    module = experts.FewTokenExperts(up[2], down[2], ACTIVE, count, alpha=ALPHA, limit=LIMIT)
    if tokens > module.max_tokens:
        pytest.skip("more slots than multiprocessors")
    pool = count if routing == "uniform" else ACTIVE
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    ids = torch.stack([torch.randperm(pool, device="cuda")[:ACTIVE] for _ in range(tokens)])
    weights = torch.rand(tokens, ACTIVE, device="cuda")
    out = run(module, x, ids.int(), weights)
    close(out, reference(x, ids, weights, up, down))
    assert torch.equal(out, run(module, x, ids, weights))
    for _ in range(3):
        assert torch.equal(out, run(module, x, ids.int(), weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_logits_choose_and_weigh_as_topk_softmax(
    layer: tuple[int, Weights, Weights], tokens: int, dtype: torch.dtype
) -> None:
    count, up, down = layer
    module = experts.FewTokenExperts(up[2], down[2], ACTIVE, count, alpha=ALPHA, limit=LIMIT)
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    # Distinct values: ties are broken by index here and by nothing in particular in torch.topk.
    logits = torch.stack([torch.randperm(count, device="cuda") for _ in range(tokens)]).to(dtype) / 16 - 1
    top, ids = logits.float().topk(ACTIVE)
    close(run(module, x, logits, None), reference(x, ids, top.softmax(-1), up, down))


def test_an_expert_parallel_rank_sums_only_its_own(layer: tuple[int, Weights, Weights]) -> None:
    count, up, down = layer
    mapping = torch.full((2 * count,), -1, dtype=torch.int32, device="cuda")
    mapping[count:] = torch.arange(count, dtype=torch.int32, device="cuda")
    module = experts.FewTokenExperts(up[2], down[2], ACTIVE, 2 * count, alpha=ALPHA, limit=LIMIT, expert_map=mapping)
    x = torch.randn(8, HIDDEN, device="cuda").bfloat16()
    ids = torch.stack([torch.randperm(2 * count, device="cuda")[:ACTIVE] for _ in range(8)])
    ids[0] = torch.arange(ACTIVE)  # a token with no expert here
    weights = torch.rand(8, ACTIVE, device="cuda")
    out = run(module, x, ids.int(), weights)
    close(out, reference(x, mapping[ids].long(), weights, up, down))
    assert not out[0].any()


def test_a_graph_replays_on_new_inputs(layer: tuple[int, Weights, Weights]) -> None:
    count, up, down = layer
    module = experts.FewTokenExperts(up[2], down[2], ACTIVE, count, alpha=ALPHA, limit=LIMIT)
    x = torch.randn(2, HIDDEN, device="cuda").bfloat16()
    logits = torch.randn(2, count, device="cuda").bfloat16()
    out = torch.empty_like(x)
    module(x, logits, None, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            module(x, logits, None, out)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        logits.copy_(torch.randn_like(logits))
        wanted = run(module, x, logits, None)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)
