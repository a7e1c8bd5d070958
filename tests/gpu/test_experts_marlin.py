"""The expert kernels over Marlin's layout, as compute_80 PTX in the shared memory of other GPUs, against float64.

The bytes are from the plugin's index maps; benchmarks/sm80_experts.py runs the kernels over vLLM's own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu import cases
from tests.gpu.cases import ACTIVE, ALPHA, LIMIT, C, Weights
from tests.gpu.marks import SM90
from vllm_gptoss.engine.experts.marlin import marlin_bias, marlin_scales, marlin_values
from vllm_gptoss.engine.kernels.experts_marlin import MarlinFewExperts, MarlinProjection

pytestmark = SM90

HIDDEN = 3072
"""As vLLM pads it."""


def stored(weights: Weights, rows: int, columns: int) -> MarlinProjection:
    """With padding to so many rows and columns."""
    real, half = weights.blocks.shape[1:]
    more, pad = rows - real, torch.nn.functional.pad
    values = marlin_values(pad(weights.blocks, (0, columns // 2 - half, 0, more)))
    scales = marlin_scales(pad(weights.scales, (0, (columns - 2 * half) // 32, 0, more)))
    bias = marlin_bias(pad(weights.projection.bias, (0, more)).bfloat16())
    return MarlinProjection(values.contiguous().view(torch.int32), scales.contiguous(), bias, real, 2 * half)


class OverMarlin:
    """The kernels of a layer, on activations without padding."""

    def __init__(self, up: Weights, down: Weights, limit: int, blocks: int, expert_map: Tensor | None = None) -> None:
        inner = -(-down.blocks.shape[2] * 2 // 128) * 128
        self.few = MarlinFewExperts(
            stored(up, 2 * inner, HIDDEN), stored(down, HIDDEN, inner), ACTIVE, alpha=ALPHA, limit=LIMIT,
            expert_map=expert_map, arch="compute_80", shared=limit, blocks=blocks,
        )  # fmt: skip

    def __call__(self, x: Tensor, routing: Tensor, weights: Tensor | None, out: Tensor) -> None:
        if weights is None:
            weights, routing = routing.float().topk(ACTIVE)
            weights = weights.softmax(-1)
        padded = torch.nn.functional.pad(x, (0, HIDDEN - C), value=float("nan"))
        wide = cases.poison(len(x), HIDDEN)
        self.few(padded, routing, weights, wide)
        out.copy_(wide[:, :C])
        out += wide[:, C:].float().sum()  # zero


@pytest.fixture(scope="module", params=[(32, 2880), (32, 1472), (128, 384)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def layer(request: pytest.FixtureRequest) -> tuple[Weights, Weights]:
    torch.cuda.empty_cache()
    return cases.layer(*request.param)


@pytest.mark.parametrize(("limit", "blocks"), [(99 << 10, 82), (163 << 10, 108), (99 << 10, 48)])
@pytest.mark.parametrize("skewed", [False, True], ids=["uniform", "skewed"])
def test_every_batch_matches_float64_and_repeats_bit_for_bit(
    layer: tuple[Weights, Weights], limit: int, blocks: int, skewed: bool
) -> None:
    cases.experts(OverMarlin(*layer, limit, blocks), *layer, 64, skewed)


@pytest.mark.parametrize("tokens", [8, 64])
def test_an_expert_parallel_rank_sums_only_its_own(layer: tuple[Weights, Weights], tokens: int) -> None:
    cases.experts_of_a_rank(lambda few: OverMarlin(*layer, 99 << 10, 82, few.expert_map), *layer, tokens)


def test_a_graph_replays_on_new_inputs(layer: tuple[Weights, Weights]) -> None:
    cases.experts_in_a_graph(OverMarlin(*layer, 99 << 10, 82), *layer, 2)
