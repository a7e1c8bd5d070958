"""A whole step of one token in one launch, on the GPU it is made for."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from benchmarks import reference
from tests.gpu import cases
from tests.gpu.cases import ACTIVE, EPS, HEAD, C, Weights, draw, run_step
from tests.gpu.marks import SM90
from vllm_gptoss.engine.kernels import step
from vllm_gptoss.engine.kernels.layer import LayerTensors, Requests
from vllm_gptoss.engine.model import layer_upto16

pytestmark = SM90


@functools.cache
def experts(count: int) -> tuple[Weights, Weights]:
    return cases.layer(count, 2880)


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 127, 128, 129, 130, 640, 1024, 1025, 7683, 20_000])
def test_any_number_of_keys(keys: int, window: int) -> None:
    cases.step(run_step, *experts(32), keys, window=window)


@pytest.mark.parametrize("block", [16, 32, 256])
@pytest.mark.parametrize("strided", [False, True])
def test_any_layout_of_the_cache(block: int, strided: bool) -> None:
    cases.step(run_step, *experts(32), 700, block=block, strided=strided)


def test_the_120b_and_a_first_layer() -> None:
    for first in (True, False):
        cases.step(run_step, *experts(128), 300, first=first)


def a_layer(up: Weights, down: Weights) -> LayerTensors:
    return cases.layer_tensors(up, down, torch.randn(32, HEAD, device="cuda"))


def one_layer(layer: LayerTensors, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(experts' output, the norm they read, router logits) of token 20 of a request."""
    positions = torch.tensor([19], device="cuda")
    out, hidden = run_step([layer], [cases.filled_cache(4)], x, None, positions, cases.request_of(20, 4))
    normed = reference.rms_norm(hidden.double(), layer.post_norm.double())
    return out, normed, normed @ layer.router_weight.double().T + layer.router_bias.double()


def test_all_logits_alike_choose_the_first_experts() -> None:
    up, down = experts(32)
    layer = a_layer(up, down)
    layer.router_weight.zero_()
    layer.router_bias.zero_()
    out, normed, _ = one_layer(layer, draw(1, C))
    ids, weights = torch.arange(ACTIVE, device="cuda")[None], torch.full((1, ACTIVE), 0.25, device="cuda")
    assert cases.error(out, cases.experts_oracle(normed, ids, weights, up, down)) < 2**-7


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e3, 1e12])
def test_any_size_of_activations_is_routed(scale: float) -> None:
    """The logits are added up as fixed point, in units of the layer's input."""
    up, down = experts(32)
    layer = a_layer(up, down)
    layer.out_weight.mul_(scale)
    layer.out_bias.mul_(scale)
    out, normed, logits = one_layer(layer, draw(1, C, scale=scale))
    top, ids = logits.topk(ACTIVE)
    assert cases.error(out, cases.experts_oracle(normed, ids, top.softmax(-1), up, down)) < 2**-7


def six_launches(
    layers: list[LayerTensors], caches: list[Tensor], x: Tensor, positions: Tensor, requests: list[Requests]
) -> tuple[Tensor, Tensor]:
    residual = None
    for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        x, residual = layer_upto16.layer(layer, cache, requests[index % 2], positions, x, residual)
    assert residual is not None
    return x, residual


def test_a_model_in_one_launch_equals_six_a_layer_and_itself_in_a_graph() -> None:
    """Buffers alternate between layers, kinds of layers have separate tables, and replays have no later effect."""
    up, down = experts(32)
    keys, blocks = 700, 48
    cos_sin, x, positions = torch.randn(keys, HEAD, device="cuda"), draw(1, C), torch.tensor([keys - 1], device="cuda")
    layers = [cases.layer_tensors(up, down, cos_sin, window=0 if index % 2 else 128) for index in range(5)]
    caches = [cases.filled_cache(blocks) for _ in layers]
    requests = [cases.request_of(keys, blocks) for _ in range(2)]
    wanted = six_launches(layers, caches, x, positions, requests)
    made = step.Step(layers, eps=EPS)
    # a table of a cache that vLLM has given up meanwhile is not taken for the one of now
    assert made.table([index % 2 for index in range(5)], [cases.filled_cache(1) for _ in layers]) is not None
    table = made.table([index % 2 for index in range(5)], caches)
    assert table is not None
    got = made(x, None, positions, requests, table)
    for mine, its in zip(got, wanted, strict=True):
        assert cases.error(mine, its.double()) < 2**-6, "five layers of rounding"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert made.table([0] * 5, caches) is None, "a table cannot be made while a graph is captured"
        replayed = made(x, None, positions, requests, table)
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(cases.same, got, replayed))
