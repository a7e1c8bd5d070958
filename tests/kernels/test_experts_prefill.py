"""The kernels for large steps without a GPU: they compile for every shape without serialised products or spills."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cubins import compiled
from tests.kernels.test_experts_many import SHAPES, prepared
from vllm_gptoss.kernels import experts_plan, nvrtc
from vllm_gptoss.kernels.experts_prefill import COMBINE, EXPERTS, ROUTE, SLICE_TOKENS, SOURCE, PrefillExperts, state


def prefill(*shape: int) -> PrefillExperts:
    many = prepared(*shape)
    return PrefillExperts(many.few) if hasattr(many, "few") else PrefillExperts(many)


CHECKS = """
static_assert(SHARED_BYTES <= {shared}, "shared memory");
static_assert(sizeof(State) <= 2048 && sizeof(Routing) == 48, "what the host lays out");
static_assert(ROUTERS == 128 && ADDERS == 256 && THREADS == 512, "what the host launches");
"""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_compiles_and_has_the_shared_memory_it_takes(shape: tuple[int, int, int, int, int]) -> None:
    made = prefill(*shape)
    recipes = made.recipes(torch.bfloat16)
    recipe = recipes[1]
    options = [*(f"-D{k}={v}" for k, v in recipe.options), f"--maxrregcount={recipe.registers}"]
    image = compiled(nvrtc.source(SOURCE) + CHECKS.format(shared=recipe.shared), "sm_90a", options)
    assert all(name.encode() in image for name in (ROUTE, EXPERTS, COMBINE))
    assert recipe.shared <= experts_plan.SHARED_LIMIT
    assert len({each.options for each in recipes}) == 1, "one cubin"


@pytest.mark.parametrize("routing", [torch.int32, torch.int64, torch.float32])
def test_every_routing_dtype_compiles(routing: torch.dtype) -> None:
    recipe = prefill(16, 384, 2880, 4, 32).recipes(routing)[1]
    options = [*(f"-D{k}={v}" for k, v in recipe.options), f"--maxrregcount={recipe.registers}"]
    assert compiled(nvrtc.source(SOURCE), "sm_90a", options)


def test_more_tokens_than_it_takes_are_refused() -> None:
    made = prefill(32, 384, 2880, 4, 32)
    x, logits = torch.empty(16_385, 2880, device="meta"), torch.empty(16_385, 32, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match="1 to 16384 tokens, got 16385"):
        made(x, logits, None, torch.empty_like(x))


def test_memory_is_bounded_by_a_slice() -> None:
    made = prefill(32, 2880, 2880, 4, 32)
    assert made.workspace_bytes(16_384) == made.workspace_bytes(SLICE_TOKENS)
    assert made.workspace_bytes(SLICE_TOKENS) == SLICE_TOKENS * 4 * (2880 * 4 + 12)
    assert callable(state)
