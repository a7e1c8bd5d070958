"""The kernels for large steps, without a GPU: they compile for every shape, ptxas does not serialise products for lack
of registers, and no kernel reads past shared memory."""

from __future__ import annotations

import pytest
import torch

from tests.engine.kernels.cubins import compiled, judged
from tests.engine.kernels.on_meta import SHAPES, prepared
from tests.support.scale import SOAK
from vllm_gptoss.engine.kernels import experts_plan, nvrtc
from vllm_gptoss.engine.kernels.experts_prefill import NAMES, SLICE_TOKENS, SOURCE, PrefillExperts, slice_of

CHECKS = """
static_assert(SHARED_BYTES <= {shared}, "shared memory");
static_assert(sizeof(State) <= 2048 && sizeof(Routing) == 48, "what the host lays out");
static_assert(ROUTERS == 128 && ADDERS == 256 && THREADS == 512, "what the host launches");
"""


def prefill(*shape: int) -> PrefillExperts:
    count, intermediate, hidden, active, routed = shape
    return PrefillExperts(prepared(count, intermediate, hidden, active, routed))


@pytest.mark.soak
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_compiles_and_has_the_shared_memory_it_takes(shape: tuple[int, int, int, int, int]) -> None:
    """To the end for the 20b and the 120b; in `make soak` all."""
    job = prefill(*shape).compile_job(torch.bfloat16)
    options = [*(f"-D{k}={v}" for k, v in job.options), f"--maxrregcount={job.registers}"]
    source = nvrtc.source(SOURCE) + CHECKS.format(shared=job.shared)
    if SOAK or shape in SHAPES[:2]:
        image = compiled(source, "sm_90a", options)
        assert all(name.encode() in image for name in NAMES)
    else:
        judged(source, "sm_90a", options)
    assert job.shared <= experts_plan.SHARED_LIMIT


@pytest.mark.parametrize("routing", [torch.int32, torch.int64, torch.float32])
def test_every_routing_dtype_compiles(routing: torch.dtype) -> None:
    job = prefill(16, 384, 2880, 4, 32).compile_job(routing)
    options = [*(f"-D{k}={v}" for k, v in job.options), f"--maxrregcount={job.registers}"]
    judged(nvrtc.source(SOURCE), "sm_90a", options)


def test_a_step_without_tokens_is_refused() -> None:
    made = prefill(32, 384, 2880, 4, 32)
    x, logits = torch.empty(0, 2880, device="meta"), torch.empty(0, 32, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match="no tokens"):
        made(x, logits, None, torch.empty_like(x))


def test_more_choices_than_a_token_can_have_here_are_refused() -> None:
    many = prepared(32, 384, 2880, 4, 32)
    many.active = 9
    with pytest.raises(ValueError, match="9 experts a token, not 1 to 8"):
        PrefillExperts(many)


def test_passes_are_alike_and_bound_the_memory() -> None:
    assert [slice_of(tokens) for tokens in (1, 8192, 8193, 16_384, 16_385)] == [1, 8192, 4097, 8192, 5462]
    assert all(slice_of(tokens) <= SLICE_TOKENS for tokens in range(1, 70_000, 997))
    made = prefill(32, 2880, 2880, 4, 32)
    assert made.workspace_bytes(32_768) == made.workspace_bytes(SLICE_TOKENS) == SLICE_TOKENS * 4 * (2880 * 4 + 12)
