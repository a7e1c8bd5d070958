"""The kernels with a KV cache of e4m3 codes: they read every code exactly, and write those that vLLM writes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu import cases
from tests.gpu.cases import BLOCK, DEVICE, HEAD, PARALLEL, C, Weights, draw, poison, run_step, same
from tests.gpu.marks import SM90
from tests.support import fp8
from vllm_gptoss.engine.kernels import attention, attention_many, dense, norm_rope_router, nvrtc, product_many, step
from vllm_gptoss.engine.kernels.cache import E4M3, Fp8Cache, PagedCache
from vllm_gptoss.engine.kernels.experts_many import ManyTokenExperts
from vllm_gptoss.engine.model import layer_upto16, layer_upto512

pytestmark = SM90
SCALE = (0.02, 3.0)
IN_RANGE = (0.1, 3.0)
"""Of rotated keys, a few of which lie beyond 448 * 0.02."""
KERNELS: dict[str, Callable[..., None]] = {"few": attention.attend, "many": attention_many.attend}
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 130, 143, 144, 145, 255, 256, 257, 1000, 4001]


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("lengths", "queries"), [*cases.BATCHES, (EDGES[:16], [1] * 16), (EDGES, [1] * len(EDGES))])
def test_attention_of_any_lengths(
    kernel: str, lengths: list[int], queries: list[int], strided: bool, window: int
) -> None:
    cases.attention(KERNELS[kernel], 8, window, lengths, queries, strided, scales=SCALE)


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_of_a_rank(kernel: str, parallel: int, window: int) -> None:
    cases.attention(KERNELS[kernel], 8 // parallel, window, EDGES[:15], [1] * 15, strided=True, scales=SCALE)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_cache_blocks_of_any_power_of_two(kernel: str, block: int) -> None:
    cases.attention(KERNELS[kernel], 8, 0, EDGES[:15], [1] * 15, strided=True, block=block, scales=SCALE)


@pytest.mark.parametrize("scales", fp8.SCALES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_scales_of_any_size(kernel: str, scales: tuple[float, float]) -> None:
    for window in (0, 128):
        cases.attention(KERNELS[kernel], 8, window, [5, 130, 1000], [1, 4, 3], strided=False, scales=scales)


@pytest.mark.parametrize(("lengths", "queries"), cases.LONG_BATCHES)
def test_long_contexts(lengths: list[int], queries: list[int]) -> None:
    cases.attention(attention.attend, 8, 0, lengths, queries, strided=False, scales=SCALE)


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize(("requests", "each"), [(4, 1), (16, 1), (64, 1), (4, 4), (16, 4), (16, 8)])
def test_a_graph_serves_lengths_that_it_was_not_captured_with(requests: int, each: int, window: int) -> None:
    half = requests // 2
    steps = ([19_000] + [100] * (requests - 1), [7_000] * half + [0] * half, [576] * requests, [each] * requests)
    kernel = KERNELS["few" if requests * each <= 16 else "many"]
    cases.attention_in_a_graph(kernel, 8, window, steps, each, scales=SCALE)


def one_key(kernel: Callable[..., None], codes: Tensor) -> Tensor:
    """The output of one token with one key, whose value is `codes` [8, 64], without a sink: the value. [8, 64] bf16."""
    tensor = torch.zeros(1, 8, BLOCK, 2 * HEAD, dtype=torch.uint8, device=DEVICE)
    tensor[0, :, 0, HEAD:] = codes
    one, sinks = torch.ones((), device=DEVICE), torch.full((64,), float("-inf"), device=DEVICE).bfloat16()
    zero, out = torch.zeros(1, 1, device=DEVICE, dtype=torch.int32), poison(1, 64 * HEAD)
    starts, cache = torch.tensor([0, 1], device=DEVICE, dtype=torch.int32), Fp8Cache(tensor, one, one)
    kernel(draw(1, 64 * HEAD), cache, sinks, zero, starts[1:], starts, out, HEAD**-0.5, 0)
    heads = out.view(8, 8, HEAD)
    assert all(same(heads[:, head], heads[:, 0]) for head in range(8))
    return heads[:, 0].contiguous()


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_code_is_read_exactly(kernel: str) -> None:
    codes = torch.arange(512, device=DEVICE).remainder(256).to(torch.uint8).view(8, HEAD)
    finite = (codes & 0x7F) != fp8.NAN
    codes = torch.where(finite, codes, 0)
    for turn in range(HEAD):  # each in every column
        given = codes.roll(turn, 1)
        assert torch.equal(one_key(KERNELS[kernel], given), given.view(torch.float8_e4m3fn).bfloat16())


@pytest.mark.parametrize("scales", fp8.EXTREMES)
@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("tokens", [1, 8, 9, 16])
def test_the_projection_of_few_tokens_writes_codes(tokens: int, parallel: int, scales: tuple[float, float]) -> None:
    heads, rows = 64 // parallel, 80 // parallel * HEAD
    x, norm, weight, bias = draw(tokens, C), draw(C), draw(rows, C, scale=C**-0.5), draw(rows)
    positions, cos_sin, slots = cases.turning(tokens, torch.float32)

    def run(cache: PagedCache) -> Tensor:
        q = poison(tokens, heads * HEAD)
        dense.qkv_rope(x, None, norm, weight, bias, positions, cos_sin, slots, cache, q, None, cases.EPS)
        return q

    cases.coded(run, parallel, scales)


@pytest.mark.parametrize("scales", fp8.EXTREMES)
@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("tokens", [17, 32, 100, 512])
def test_rope_writes_codes(tokens: int, parallel: int, scales: tuple[float, float]) -> None:
    qkv = draw(tokens, 80 // parallel * HEAD)
    positions, cos_sin, slots = cases.turning(tokens, torch.float32)

    def run(cache: PagedCache) -> Tensor:
        mine = qkv.clone()
        norm_rope_router.rope(mine, positions, cos_sin, slots, cache)
        return mine

    cases.coded(run, parallel, scales)


@pytest.mark.parametrize("scales", fp8.EXTREMES)
@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("tokens", [1, 17, 32])
def test_the_rotated_product_writes_codes(tokens: int, parallel: int, scales: tuple[float, float]) -> None:
    heads, rows = 64 // parallel, 80 // parallel * HEAD
    x, weight, bias = cases.tile(draw(tokens, C)), draw(rows, C, scale=C**-0.5), draw(rows)
    positions, cos_sin, slots = cases.turning(tokens, torch.float32)

    def run(cache: PagedCache) -> Tensor:
        out = poison(tokens, rows)
        product_many.rotated(x, weight, bias, out, positions, cos_sin, slots, cache)
        return out[:, : heads * HEAD]

    cases.coded(run, parallel, scales)


@pytest.mark.parametrize("scale", [1.0, 0.02, 0.0, 2.0**-149, 2.0**-140, 3.4e38])
def test_every_bf16_is_written_as_vllm_writes_it(scale: float) -> None:
    """All 65,536, infinities and NaN too, as values, which are not rotated."""
    from vllm import _custom_ops as ops

    tokens = 2**16 // (8 * HEAD)
    qkv = torch.zeros(tokens, 80 * HEAD, device=DEVICE, dtype=torch.bfloat16)
    qkv[:, 72 * HEAD :] = torch.arange(2**16, device=DEVICE).to(torch.int16).view(torch.bfloat16).view(tokens, -1)
    key, value = (part.view(tokens, 8, HEAD) for part in qkv[:, 64 * HEAD :].clone().split(8 * HEAD, 1))
    slots, positions = torch.arange(tokens, device=DEVICE), torch.zeros(tokens, device=DEVICE, dtype=torch.int64)
    cos_sin, one = torch.ones(1, HEAD, device=DEVICE), torch.ones((), device=DEVICE)
    v_scale = torch.tensor(scale, device=DEVICE)
    mine, theirs = (torch.zeros(tokens // BLOCK, 8, BLOCK, 2 * HEAD, dtype=torch.uint8, device=DEVICE) for _ in "12")
    norm_rope_router.rope(qkv, positions, cos_sin, slots, Fp8Cache(mine, one, v_scale))
    halves = theirs.transpose(1, 2).split(HEAD, -1)
    ops.reshape_and_cache_flash(key, value, *halves, slots, "fp8", one, v_scale)

    def plain(codes: Tensor) -> Tensor:  # NaN has two codes
        return torch.where((codes & 0x7F) == fp8.NAN, fp8.NAN, codes)

    assert torch.equal(plain(mine), plain(theirs))


@functools.cache
def experts(count: int) -> tuple[Weights, Weights]:
    return cases.layer(count, 2880)


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 127, 128, 129, 130, 640, 1025, 7683, 20_000])
def test_a_step_of_one_token_with_any_number_of_keys(keys: int, window: int) -> None:
    cases.step(run_step, *experts(32), keys, window=window, scales=IN_RANGE)


@pytest.mark.parametrize("block", [16, 32, 256])
@pytest.mark.parametrize("strided", [False, True])
def test_a_step_of_one_token_with_any_layout(block: int, strided: bool) -> None:
    cases.step(run_step, *experts(128), 700, block=block, strided=strided, first=strided, scales=IN_RANGE)


def caches(layers: int, blocks: int) -> list[PagedCache]:
    return [fp8.cache_of(cases.filled_cache(blocks), (0.1 * (at + 1), 1.5 + at)) for at in range(layers)]


def test_a_model_in_one_launch_equals_six_a_layer() -> None:
    """Layers have different scales. Blocks read codes that the cache does not hold yet."""
    up, down = experts(32)
    keys, blocks, count = 700, 48, 5
    cos_sin, x, positions = torch.randn(keys, HEAD, device=DEVICE), draw(1, C), torch.tensor([keys - 1], device=DEVICE)
    layers = [cases.layer_tensors(up, down, cos_sin, window=0 if at % 2 else 128) for at in range(count)]
    layers = [
        replace(each, router_bias=each.router_bias * 40) for each in layers
    ]  # a code of another rounding exchanges no expert
    held, requests = caches(count, blocks), cases.request_of(keys, blocks)
    hidden, residual = x, None
    for layer, cache in zip(layers, held, strict=True):
        hidden, residual = layer_upto16.layer(layer, cache, requests, positions, hidden, residual)
    made = step.Step(layers, eps=cases.EPS, element=E4M3)
    table = made.table([0] * count, held)
    assert table is not None
    assert residual is not None
    for mine, its in zip(made(x, None, positions, [requests], table), (hidden, residual), strict=True):
        assert cases.error(mine, its.double()) < 2**-6, "five layers of rounding"


@pytest.mark.parametrize(("tokens", "each"), [(4, 1), (24, 1), (64, 1), (64, 4), (128, 8)])
def test_a_chain_in_a_graph_equals_the_same_calls_one_by_one(
    tokens: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    up, down = experts(32)
    x, cos_sin, blocks = draw(tokens, C), torch.randn(1024, HEAD, device=DEVICE), 64
    layers = [cases.layer_tensors(up, down, cos_sin, window=0 if at % 2 else 128) for at in range(3)]
    count = tokens // each
    held = caches(3, count * blocks)
    table = torch.randperm(count * blocks, device=DEVICE).int().view(count, blocks)
    lens = torch.randint(each, 1000, (count,), device=DEVICE, dtype=torch.int32)
    requests, positions = cases.decoding(table, lens, each)

    def run() -> tuple[Tensor]:
        hidden, residual = x, None
        for layer, cache in zip(layers, held, strict=True):
            given: Any = (cache, requests, positions, hidden, residual)
            if tokens <= 16:
                hidden, residual = layer_upto16.layer(layer, *given)
            else:
                assert layer.experts is not None
                hidden, residual = layer_upto512.layer(layer, ManyTokenExperts(layer.experts), *given)
        return (hidden,)

    cases.alike_in_a_graph(run, monkeypatch)


FAULTS = {
    "few: halves of a key": ("few", "widen((u32)word(c.k[n], k) >> i * 16)", "widen((u32)word(c.k[n], k))"),
    "few: a value's column": ("few", "(t & 2) ? 0x7362u : 0x5140u", "0x5140u"),
    "many: a column": ("many", "ldmatrix4_turned(b, v_at + ((4 + m +", "ldmatrix4_turned(b, v_at + ((4 +"),
    "many: an output's place": ("many", "row[16 * m + 4 * j]", "row[16 * m + 4 * (j ^ 1)]"),
    "few: no scale of values": ("few", "return sum * v;", "return sum;"),
    "many: no scale of keys": ("many", "return scale * k;", "return scale;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, there, instead = FAULTS[fault]
    module: Any = {"few": attention, "many": attention_many}[name]
    whole = nvrtc.source(module.SOURCE)
    assert whole.count(there) == 1
    monkeypatch.setattr(nvrtc, "source", lambda path: whole.replace(there, instead))
    monkeypatch.setattr(module, "kernel", module.kernel.__wrapped__)
    with pytest.raises(AssertionError):
        cases.attention(KERNELS[name], 8, 0, [300, 20], [1, 1], strided=False, scales=SCALE)
