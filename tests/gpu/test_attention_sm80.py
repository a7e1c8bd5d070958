"""Decode attention as PTX of GPUs before Hopper, with as many blocks as fit their shared memory, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.gpu import cases
from tests.gpu.cases import EDGES, ragged
from tests.gpu.marks import SM90
from vllm_gptoss.engine.kernels import attention_many

pytestmark = SM90

STEPS: dict[str, list[int]] = {
    "1 of 1 key": [1],
    "1 of 16,000": [16_000],
    "2 of both": [1, 16_000],
    "edges": EDGES,
    "64": [1, 16_000, *ragged(61, 2000)],  # and one of padding, as every case has
    "65": [16_000, *ragged(63, 2000)],
    "512": [16_000, 1, *ragged(509, 700)],
}


@pytest.fixture(params=["compute_80", "compute_86"])
def attend(request: pytest.FixtureRequest) -> Callable[..., None]:
    def kernel(q: Tensor, *rest: Any) -> None:
        attention_many.attend(q, *rest, attention_many.plan(len(q), rest[-1], arch=request.param))

    return kernel


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_decode_step_of_any_lengths(attend: Callable[..., None], step: str, strided: bool, window: int) -> None:
    cases.attention(attend, 8, window, STEPS[step], [1] * len(STEPS[step]), strided)


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("requests", [1, 64])
def test_a_graph_serves_lengths_that_it_was_not_captured_with(
    attend: Callable[..., None], requests: int, window: int
) -> None:
    """One long request, then short ones, then fewer requests than tokens."""
    steps = ([16_000, *[100] * 63], [1, *ragged(63, 300)], [7_000] * 24 + [0] * 40)
    cases.attention_in_a_graph(attend, 8, window, [step[:requests] for step in steps])


@pytest.mark.parametrize("window", [0, 128])
def test_heads_of_a_rank_and_larger_cache_blocks(attend: Callable[..., None], window: int) -> None:
    cases.attention(attend, 2, window, EDGES, [1] * len(EDGES), strided=True, block=64)
