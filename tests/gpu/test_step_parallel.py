"""A step of one token in one launch on each of two GPUs. One process drives both ranks.

While a rank waits for the other's launch, nothing of this process may load, allocate or copy: that waits for the GPU.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.gpu import cases
from tests.gpu.cases import ACTIVE, ALPHA, EPS, HEAD, LIMIT, C, Weights, draw
from tests.gpu.marks import SM90
from vllm_gptoss.engine.kernels import step
from vllm_gptoss.engine.kernels.experts import FewTokenExperts, Projection
from vllm_gptoss.engine.kernels.layer import LayerTensors, Requests
from vllm_gptoss.engine.model import layer_upto16

pytestmark = [
    *SM90,
    pytest.mark.timeout(180),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
RANKS, HEADS, KV_HEADS, INTERMEDIATE = 2, 64, 8, 1472
Share = tuple[Weights, Weights]


def experts(count: int) -> list[Share]:
    """Up and down projections of each rank."""
    sizes = ((2 * INTERMEDIATE, C), (C, INTERMEDIATE))
    made = [[Weights(count, *size, 10 * rank + at) for at, size in enumerate(sizes)] for rank in range(RANKS)]
    return [(up, down) for up, down in made]


def of_rank(whole: LayerTensors, rank: int, up: Weights, down: Weights) -> LayerTensors:
    """A rank's share of a layer, on the first GPU."""
    heads, kv = HEADS // RANKS * HEAD, KV_HEADS // RANKS * HEAD
    kept = torch.cat([
        torch.arange(rank * size, (rank + 1) * size, device="cuda") + start
        for start, size in ((0, heads), (HEADS * HEAD, kv), ((HEADS + KV_HEADS) * HEAD, kv))
    ])  # fmt: skip
    return dataclasses.replace(
        whole,
        qkv_weight=whole.qkv_weight[kept].contiguous(),
        qkv_bias=whole.qkv_bias[kept].contiguous(),
        out_weight=whole.out_weight[:, rank * heads : (rank + 1) * heads].contiguous(),
        out_bias=whole.out_bias if rank == 0 else None,
        sinks=whole.sinks.chunk(RANKS)[rank].contiguous(),
        experts=FewTokenExperts(up.projection, down.projection, ACTIVE, up.blocks.shape[0], alpha=ALPHA, limit=LIMIT),
    )


def moved(layer: LayerTensors, rank: int) -> LayerTensors:
    """The same on the rank's GPU."""
    if rank == 0:
        return layer
    found = layer.experts
    assert found is not None
    here = {
        name: value.to(f"cuda:{rank}")
        for name, value in ((field.name, getattr(layer, field.name)) for field in dataclasses.fields(layer))
        if isinstance(value, Tensor)
    }
    up, down = (
        Projection(*(tensor.to(f"cuda:{rank}") for tensor in (each.values, each.scales, each.bias)))
        for each in (found.up, found.down)
    )
    with torch.cuda.device(rank):
        copy = FewTokenExperts(up, down, ACTIVE, up.experts, alpha=ALPHA, limit=LIMIT)
    return dataclasses.replace(layer, **here, experts=copy)


def synchronize() -> None:
    for rank in range(RANKS):
        torch.cuda.synchronize(rank)


class Model:
    """Layers of two ranks, each on its GPU, and a request of `keys` tokens."""

    def __init__(self, layers: int, count: int, keys: int) -> None:
        torch.manual_seed(keys)
        blocks, cos_sin = -(-keys // cases.BLOCK) + 3, cases.rotations(keys + 1)
        shares = experts(count)
        self.layers: list[list[LayerTensors]] = [[] for _ in range(RANKS)]
        for index in range(layers):
            whole = cases.layer_tensors(*shares[0], cos_sin, window=0 if index % 2 else 128)
            whole.router_bias.mul_(4)  # choices far apart: no rounding changes one
            for rank, of in enumerate(self.layers):
                of.append(of_rank(whole, rank, *shares[rank]))
        size = (layers, RANKS, blocks, cases.BLOCK, KV_HEADS // RANKS, 2 * HEAD)
        self.caches = draw(*size).transpose(3, 4)
        self.requests = cases.request_of(keys, blocks)
        self.positions = torch.tensor([keys - 1], device="cuda")
        self.steps: list[step.Step] = []
        self.tables: list[Tensor] = []
        self.received: list[Tensor] = []
        self.held: list[tuple[Tensor, list[Requests], Tensor]] = []
        for rank in range(RANKS):
            self._on(rank)
        for rank, made in enumerate(self.steps):
            made.rank, made.received = rank, [each.data_ptr() for each in self.received]
        synchronize()

    def _on(self, rank: int) -> None:
        gpu = f"cuda:{rank}"
        with torch.cuda.device(rank):
            made = step.Step([moved(layer, rank) for layer in self.layers[rank]], eps=EPS, ranks=RANKS)
            made.compile()
            caches = self.caches[:, rank].clone().to(gpu)  # the copy also opens the GPU's memory to the other
            table = made.table([0] * len(caches), list(caches))
            assert table is not None
            requests = Requests(*(getattr(self.requests, f.name).to(gpu) for f in dataclasses.fields(Requests)))
            self.steps.append(made)
            self.tables.append(table)
            self.received.append(torch.zeros(made.plan.received_bytes, dtype=torch.uint8, device=gpu))
            self.held.append((caches, [requests], self.positions.to(gpu)))
            torch.ones(1, device=f"cuda:{1 - rank}").to(gpu)
            _ = [torch.empty(2**19, dtype=torch.uint8, device=gpu) for _ in range(16)]  # for the step's own tensors

    def launch(self, rank: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """A rank's step on its GPU. It ends once the other rank's runs too."""
        with torch.cuda.device(rank):
            _, requests, positions = self.held[rank]
            return self.steps[rank](x, None, positions, requests, self.tables[rank])

    def __call__(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        inputs = [x.to(f"cuda:{rank}") for rank in range(RANKS)]
        synchronize()
        return [self.launch(rank, here) for rank, here in enumerate(inputs)]

    def by_launches(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same by six launches a layer and rank on one GPU, which sums the ranks' addends."""
        residual = None
        for index, layers in enumerate(zip(*self.layers, strict=True)):
            addends = []
            for rank, layer in enumerate(layers):
                cache = self.caches[index, rank].clone()
                q, summed = layer_upto16.project(layer, cache, self.requests, self.positions, x, residual)
                addends.append(layer_upto16.output(layer, layer_upto16.attend(layer, cache, self.requests, q), None))
            hidden, total = (addends[0].float() + addends[1].float()).bfloat16(), torch.empty_like(x)
            routed = layer_upto16.route(layers[0], hidden, summed, False, total)
            parts = [layer_upto16.experts(layer, *routed, None, None).float() for layer in layers]
            x, residual = (parts[0] + parts[1]).bfloat16(), total
        assert residual is not None
        return x, residual


def everywhere(results: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The outputs on the host, after a check that the ranks have the same bits."""
    first, second = ([each.cpu() for each in result] for result in results)
    assert all(map(cases.same, first, second)), "the ranks differ"
    return first


@pytest.mark.parametrize(("count", "keys"), [(32, 1), (32, 700), (128, 5000)])
def test_two_ranks_equal_six_launches_a_layer(count: int, keys: int) -> None:
    model, x = Model(4, count, keys), draw(1, C)
    wanted = model.by_launches(x)
    got = everywhere(model(x))
    for mine, its in zip(got, wanted, strict=True):
        assert cases.error(mine, its.double().cpu()) < 2**-6, "four layers of rounding"


def test_a_thousand_steps_with_late_ranks_are_all_alike() -> None:
    """What peers wrote is cleared in time, no matter which rank is ahead. Values that remain would change a step."""
    model, order = Model(4, 32, 300), random.Random(0)
    inputs = [draw(1, C, scale=scale) for scale in (1.0, 0.1, 3.0)]
    wanted = [everywhere(model(x)) for x in inputs]
    graphs: list[list[torch.cuda.CUDAGraph]] = [[], []]
    outputs: list[list[tuple[Tensor, Tensor]]] = [[], []]
    held = [[x.to(f"cuda:{rank}") for x in inputs] for rank in range(RANKS)]
    for rank in range(RANKS):
        for here in held[rank]:
            synchronize()
            with torch.cuda.device(rank):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                    outputs[rank].append(model.launch(rank, here))
                graphs[rank].append(graph)
    for _ in range(350):
        chosen = [order.randrange(len(inputs)) for _ in range(3)]
        ranks = [0, 1] if order.random() < 0.5 else [1, 0]
        for rank in ranks:
            with torch.cuda.device(rank):
                for at in chosen:
                    graphs[rank][at].replay()
            if order.random() < 0.1:
                time.sleep(0.003)
        got = everywhere([outputs[rank][chosen[-1]] for rank in range(RANKS)])
        assert all(map(cases.same, got, wanted[chosen[-1]]))
