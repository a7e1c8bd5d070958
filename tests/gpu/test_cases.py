"""The GPU tests' own cases, without a GPU: the kernels' contracts in torch pass them, a kernel with a fault does not.

So that the first minutes on a GPU are not spent on a typing error, and a green GPU run means something.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import reference
from tests.gpu import cases
from tests.support import fp8, standins
from tests.support.mxfp4 import hopper_scales_inverse, hopper_values_inverse
from vllm_gptoss.engine.experts import mxfp4
from vllm_gptoss.engine.kernels.cache import Fp8Cache, PagedCache
from vllm_gptoss.engine.kernels.layer import LayerTensors, Requests

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="the contracts that stand in for kernels run on a CPU; here the kernels themselves run",
)


class Hopper:
    """The sm90 experts' contract, over the bytes that the kernels read: bf16 activation, bf16 output."""

    active = cases.ACTIVE

    def __init__(self, up: cases.Weights, down: cases.Weights, fault: str = "") -> None:
        self.weights, self.biases, self.fault = [], [up.projection.bias, down.projection.bias], fault
        for side in (up, down):
            stored = side.projection
            blocks = hopper_values_inverse(stored.values)
            scales = hopper_scales_inverse(stored.scales, stored.rows, stored.tiles * 2)
            self.weights.append(mxfp4.dequantize(blocks, scales, torch.float32))

    def __call__(self, x: Tensor, routing: Tensor, weights: Tensor | None, out: Tensor) -> None:
        if weights is None:
            lower_first = 1e-9 * torch.arange(routing.shape[1])  # of two alike
            top, routing = (routing.double() - lower_first).topk(cases.ACTIVE)
            weights = top.softmax(-1).float()
        if self.fault == "choice":
            weights = weights.roll(1, dims=1)
        total = torch.zeros(x.shape)
        for token, choice in ((t, a) for t in range(x.shape[0]) for a in range(routing.shape[1])):
            expert = int(routing[token, choice])
            act = reference.swiglu(self.weights[0][expert] @ x[token].float() + self.biases[0][expert]).bfloat16()
            y = self.weights[1][expert] @ act.float() + (0 if self.fault == "bias" else self.biases[1][expert])
            total[token] += weights[token, choice] * y
        out.copy_(total)
        if self.fault == "unwritten":
            out[-1, -1] = float("nan")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Of 1,024 slots eight are drawn: once in 170 times a planted one was another token's, and no fault."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def layer() -> tuple[cases.Weights, cases.Weights]:
    return cases.layer(8, 128, hidden=192)


def test_experts_cases_pass_for_what_the_kernels_promise(layer: tuple[cases.Weights, cases.Weights]) -> None:
    module = Hopper(*layer)
    cases.experts(module, *layer, most=9, skewed=False)
    cases.experts(module, *layer, most=9, skewed=True)
    for dtype in (torch.bfloat16, torch.float32):
        cases.experts_by_logits(module, *layer, tokens=5, dtype=dtype)


@pytest.mark.parametrize("routed", cases.ROUTINGS)
def test_routing_cases_pass_for_what_the_kernels_promise(
    layer: tuple[cases.Weights, cases.Weights], routed: str
) -> None:
    cases.experts_by_routing(Hopper(*layer), *layer, tokens=6, routed=routed)


@pytest.mark.parametrize("fault", ["choice", "bias", "unwritten"])
def test_experts_cases_find_a_fault(layer: tuple[cases.Weights, cases.Weights], fault: str) -> None:
    with pytest.raises(AssertionError):
        cases.experts(Hopper(*layer, fault), *layer, most=3, skewed=False)
    with pytest.raises(AssertionError):
        cases.experts_by_routing(Hopper(*layer, fault), *layer, tokens=6, routed="half")


def product(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """The contract of `product_many.product`."""
    out.copy_(cases.untile(x, out.shape[0]).float() @ weight.float().T + bias.float())


@pytest.mark.parametrize("tokens", [1, 8, 19])
def test_product_case_passes_for_what_the_kernel_promises(tokens: int) -> None:
    cases.product(product, 40, 192, tokens)


def test_product_case_finds_a_fault() -> None:
    for at, index in ((0, (0, 0, 3)), (2, (5,))):
        with pytest.raises(AssertionError):
            cases.product(_faulty(product, _nudge(at, index, 1)), 40, 192, 9)


@pytest.mark.parametrize("parallel", [2, 8])
def test_layer_cases_pass_for_what_the_kernels_promise(parallel: int) -> None:
    for cache_dtype in (torch.float32, torch.bfloat16):
        cases.qkv_rope(standins.qkv_rope, parallel, 3, cache_dtype)
    cases.out_proj(standins.out_proj, parallel, 3)
    cases.router(standins.router, 32, 3)
    for lengths, queries in cases.BATCHES:
        cases.attention(standins.attend, 8 // parallel, 128, lengths, queries, strided=True)
        cases.attention(standins.attend, 8 // parallel, 0, lengths, queries, strided=False)


@pytest.mark.parametrize("scales", fp8.SCALES)
def test_cases_of_an_fp8_cache_pass_for_what_the_kernels_promise(scales: tuple[float, float]) -> None:
    for lengths, queries in cases.BATCHES:
        cases.attention(standins.attend, 2, 128, lengths, queries, strided=True, scales=scales)
        cases.attention(standins.attend, 1, 0, lengths, queries, strided=False, block=32, scales=scales)


@pytest.mark.parametrize("scales", fp8.EXTREMES)
def test_a_written_cache_is_coded(scales: tuple[float, float]) -> None:
    qkv, (positions, cos_sin, slots) = cases.draw(9, 10 * cases.HEAD), cases.turning(9, torch.float32)

    def run(cache: PagedCache, fault: int = 0) -> Tensor:
        mine = qkv.clone()
        rope(mine, positions, cos_sin, slots, cache)
        if isinstance(cache, Fp8Cache):
            cache.tensor[-1, -1, -1, -1] += fault
        return mine

    cases.coded(run, 8, scales)
    with pytest.raises(AssertionError, match="1 of 1024 codes"):
        cases.coded(functools.partial(run, fault=1), 8, scales)


def test_cases_of_an_fp8_cache_find_scales_in_each_others_place() -> None:
    def swapped(q: Tensor, cache: Fp8Cache, *rest: Any) -> None:
        standins.attend(q, Fp8Cache(cache.tensor, cache.v_scale, cache.k_scale), *rest)

    with pytest.raises(AssertionError):
        cases.attention(swapped, 1, 0, [9], [2], strided=False, scales=(0.02, 3.0))


def _faulty(kernel: Callable[..., None], change: Callable[[list[Any]], None]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        changed = list(arguments)
        change(changed)
        kernel(*changed)

    return run


def _nudge(at: int, index: tuple[Any, ...], by: float) -> Callable[[list[Any]], None]:
    def change(arguments: list[Any]) -> None:
        arguments[at] = arguments[at].clone()
        arguments[at][index] += by

    return change


def rope(qkv: Tensor, positions: Tensor, cos_sin: Tensor, slots: Tensor, cache: Tensor) -> None:
    """The contract of `around.rope`."""
    heads = cache.shape[1]
    parts = qkv.float().unflatten(-1, (-1, cases.HEAD))
    turned = standins.rotate(parts.flatten(1), cos_sin, positions)
    qkv[:, : -2 * heads * cases.HEAD] = turned[:, : -2 * heads].flatten(1).to(qkv.dtype)
    standins.store(torch.cat([turned[:, -2 * heads : -heads], parts[:, -heads:]], dim=-1), slots, cache)


def rotated(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, *turned: Tensor) -> None:
    """The contract of `product_many.rotated`."""
    product(x, weight, bias, out)
    rope(out, *turned)
    out[:, -2 * turned[3].shape[1] * cases.HEAD :] = float("nan")


def test_rope_cases_pass_for_what_the_kernels_promise() -> None:
    for tokens, strided in ((1, False), (9, True)):
        for dtype in (torch.float32, torch.bfloat16):
            cases.rope(rope, 8, tokens, dtype)
            cases.rotated(rotated, (product, rope), 8, tokens, dtype, strided)


@pytest.mark.parametrize(
    "change",
    [_nudge(0, (0, 0, 3), 1), _nudge(2, (5,), 1), _nudge(4, (0,), 1), _nudge(6, (1,), 5), _nudge(6, (2,), 1)],
    ids=["x", "bias", "position", "no slot", "slot"],
)
def test_rotated_case_finds_a_fault(change: Callable[[list[Any]], None]) -> None:
    with pytest.raises(AssertionError):
        cases.rotated(_faulty(rotated, change), (product, rope), 8, 9, torch.float32, strided=False)


def test_rotated_case_finds_a_slot_that_both_ways_write() -> None:
    """They share what finds a token's place in the cache, so neither shows the other's fault there."""
    apart = product, _faulty(rope, _nudge(3, (1,), 5))
    with pytest.raises(AssertionError, match="a slot that is no token's was written"):
        cases.rotated(_faulty(rotated, _nudge(6, (1,), 5)), apart, 8, 9, torch.float32, strided=False)


@pytest.mark.parametrize(
    ("case", "kernel", "change"),
    [
        # position off by one; a slot that is no token's
        (lambda k: cases.qkv_rope(k, 4, 3, torch.float32), standins.qkv_rope, _nudge(5, (0,), 1)),
        (lambda k: cases.qkv_rope(k, 4, 3, torch.float32), standins.qkv_rope, _nudge(7, (1,), 5)),
        (lambda k: cases.out_proj(k, 4, 3), standins.out_proj, lambda a: a.__setitem__(3, None)),
        (lambda k: cases.router(k, 32, 3), standins.router, _nudge(4, (5,), 4)),
        # a key too many, a window too short, sinks of another head
        (
            lambda k: cases.attention(k, 2, 128, *cases.BATCHES[2], False),
            standins.attend,
            lambda a: a.__setitem__(8, 127),
        ),
        (lambda k: cases.attention(k, 2, 0, [9], [2], False), standins.attend, _nudge(4, (0,), 1)),
        (
            lambda k: cases.attention(k, 2, 0, [9], [2], False),
            standins.attend,
            lambda a: a.__setitem__(2, a[2].roll(1)),
        ),
    ],
    ids=["position", "slot", "residual", "router bias", "window", "length", "sinks"],
)
def test_layer_cases_find_a_fault(
    case: Callable[[Any], None], kernel: Callable[..., None], change: Callable[[list[Any]], None]
) -> None:
    with pytest.raises(AssertionError):
        case(_faulty(kernel, change))


class OneLaunch:
    """The contract of a whole step: its parts' contracts, one after another."""

    def __init__(self, up: cases.Weights, down: cases.Weights, fault: str = "") -> None:
        self.experts, self.fault = Hopper(up, down), fault

    def __call__(
        self,
        layers: list[LayerTensors],
        caches: list[PagedCache],
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        requests: Requests,
    ) -> tuple[Tensor, Tensor]:
        for layer, cache in zip(layers, caches, strict=True):
            q, attended = torch.empty(1, 4096).bfloat16(), torch.empty(1, 4096).bfloat16()
            summed, hidden, normed, out = (torch.empty_like(x) for _ in range(4))
            standins.qkv_rope(
                x, residual, layer.norm, layer.qkv_weight, layer.qkv_bias, positions, layer.cos_sin, requests.slots,
                cache, q, summed, 1e-5,
            )  # fmt: skip
            if self.fault == "slot":
                (cache.tensor if isinstance(cache, Fp8Cache) else cache)[-1, 0, 0, 0] += 1
            standins.attend(
                q, cache, layer.sinks, requests.block_table, requests.seq_lens, requests.query_start, attended,
                0.125, 0 if self.fault == "window" else layer.window,
            )  # fmt: skip
            standins.out_proj(attended, layer.out_weight, layer.out_bias, summed, hidden)
            weights, ids = torch.empty(1, cases.ACTIVE), torch.empty(1, cases.ACTIVE, dtype=torch.int32)
            standins.router(
                hidden, None, layer.post_norm, layer.router_weight, layer.router_bias, normed, weights, ids, 1e-5
            )
            self.experts(normed, ids, weights.flip(1) if self.fault == "weights" else weights, out)
            x, residual = out, hidden
        assert residual is not None
        return x, residual


@pytest.fixture(scope="module")
def whole_layer() -> tuple[cases.Weights, cases.Weights]:
    return cases.layer(5, 64)


@pytest.mark.parametrize("window", [0, 128])
def test_step_cases_pass_for_what_the_kernel_promises(
    whole_layer: tuple[cases.Weights, cases.Weights], window: int
) -> None:
    for strided, first in ((False, False), (True, True)):
        layout: dict[str, Any] = {"window": window, "block": 32, "strided": strided, "first": first}
        cases.step(OneLaunch(*whole_layer), *whole_layer, 200, **layout)
        cases.step(OneLaunch(*whole_layer), *whole_layer, 200, **layout, scales=(0.02, 3.0))


@pytest.mark.parametrize("fault", ["slot", "window", "weights"])
def test_step_cases_find_a_fault(whole_layer: tuple[cases.Weights, cases.Weights], fault: str) -> None:
    with pytest.raises(AssertionError):
        cases.step(OneLaunch(*whole_layer, fault), *whole_layer, 200, window=128)
