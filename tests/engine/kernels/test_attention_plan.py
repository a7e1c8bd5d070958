"""Risks of the attention kernel that need no GPU: a cluster that cannot be launched, source that does not compile.
That every key is read once is for `tests/gpu`: a copy of the kernel's loop here would prove the copy."""

from __future__ import annotations

import pytest

from tests.engine.kernels.cubins import compiled
from vllm_gptoss.engine.kernels import attention, cache, nvrtc
from vllm_gptoss.engine.kernels.attention import AttentionPlan, plan

PLANS = sorted(
    {
        plan(tokens, heads, window, element)
        for tokens in range(1, 17)
        for heads in (1, 2, 4, 8)
        for window in (0, 128)
        for element in (cache.BF16, cache.E4M3)
    },
    key=str,
)


@pytest.mark.parametrize("of", PLANS, ids=str)
def test_clusters_are_portable_and_share_outputs_evenly(of: AttentionPlan) -> None:
    assert 1 <= of.splits <= attention.MAX_SPLITS
    assert (attention.GROUP * attention.HEAD) % of.splits == 0
    assert of.warps * 32 <= 1024


def test_a_window_is_one_chunk_a_warp_and_never_split() -> None:
    for tokens in range(1, 17):
        of = plan(tokens, 8, 128)
        assert of.splits == 1
        assert of.warps * 16 == 128


def test_shapes_without_a_kernel_say_why() -> None:
    assert attention.unsupported(64, 8, 64, 16) is None
    assert attention.unsupported(8, 1, 64, 64) is None
    assert attention.unsupported(64, 8, 128, 16) == "head size 128, not 64"
    assert attention.unsupported(64, 4, 64, 16) == "64 query heads for 4 key/value heads, not 8 each"
    for block in (8, 48):
        said = f"cache blocks of {block} tokens, not a power of two from 16 on"
        assert attention.unsupported(64, 8, 64, block) == said


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", range(1, 17))
def test_a_long_context_is_shared_and_every_block_of_a_token_has_a_counter(tokens: int, heads: int) -> None:
    of = plan(tokens, heads, 0)
    assert of.shares >= 2
    assert of.shares * of.splits * heads >= 64
    assert tokens * heads * of.splits <= attention.MAX_TOKENS * heads
    assert plan(tokens, heads, 128).shares == plan(tokens, heads, 256).shares == 1


def test_it_compiles_for_sm90_without_a_gpu() -> None:
    source = nvrtc.source(attention.SOURCE)
    for of in PLANS:
        cubin = compiled(source, "sm_90", [f"-D{name}={value}" for name, value in of.macros.items()])
        assert b"attention_few" in cubin
