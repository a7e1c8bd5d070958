"""Risks of the kernels on GPUs before and after Hopper, which no test runs on: they do not compile, spill, or need more
shared memory or registers than there are."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.sm80_plan import (
    KIB,
    LIMITS,
    MULTIPROCESSOR,
    REGISTERS,
    compiled,
    experts_without_weights,
)
from tests.engine.kernels.cubins import judged
from vllm_gptoss.engine.kernels import attention_many, experts, experts_marlin, nvrtc
from vllm_gptoss.engine.kernels.experts_plan import NARROW_TOKENS


@pytest.mark.parametrize("arch", LIMITS)
def test_kernels_compile_without_spills_and_a_block_fits(arch: str) -> None:
    made = list(compiled(arch))
    assert {each.kernel.partition(",")[0] for each in made} == {
        "experts_up", "experts_down", "attention_many", "norm_many", "rope_many",
    }  # fmt: skip
    for each in made:
        assert each.registers * each.threads <= REGISTERS, each
        assert each.shared <= each.limit, each
        assert each.spilled == 0, each


@pytest.mark.parametrize("limit", sorted(set(LIMITS.values())))
@pytest.mark.parametrize("blocks", [48, 82, 188])
def test_every_number_of_tokens_has_kernels(limit: int, blocks: int) -> None:
    """A narrow kernel stages two slots a block, so slots may not outnumber blocks."""
    layer = experts_without_weights(limit, blocks=blocks)
    for tokens in range(1, 65):
        for which in experts.ONLY:
            plan = layer.plan(which, tokens)
            assert plan.shared <= limit
            assert plan.most >= tokens
            assert plan.rows >= plan.slot if plan.most > NARROW_TOKENS else tokens * 4 <= blocks


@pytest.mark.parametrize("arch", LIMITS)
def test_a_multiprocessor_holds_the_blocks_of_attention(arch: str) -> None:
    for name in (arch, arch.replace("sm", "compute")):
        for tokens, window in itertools.product((1, 64, 65, 512), (0, 128)):
            many = attention_many.plan(tokens, window, arch=name)
            assert (many.arch, many.least) == (name, 512)
            assert 0 < many.blocks * (many.shared_bytes + KIB + 256) <= MULTIPROCESSOR[LIMITS[arch]]


@pytest.mark.parametrize("tokens", [1, 8, 16, 64])
def test_shared_memory_is_counted_as_the_kernel_lays_it_out(tokens: int) -> None:
    layer = experts_without_weights(min(LIMITS.values()))
    plan = layer.plan("experts_down", tokens)
    check = f"\nstatic_assert(META_BYTES + RED_BYTES + RING_BYTES + {plan.rows} * XSTRIDE == {plan.shared});"
    options = [f"-D{name}={value}" for name, value in layer.macros(plan, torch.int32).items()]
    source = nvrtc.source(experts_marlin.SOURCE)
    judged(source + check, "sm_86", options)
    with pytest.raises(nvrtc.NvrtcError, match="static assertion failed"):
        judged(source + check.replace("== ", "== 1 + "), "sm_86", options)
