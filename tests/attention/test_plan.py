"""Risks of the attention kernel that need no GPU: keys left out by the split, fragments that miss an element, source
that does not compile."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from vllm_gptoss.kernels import attention, nvrtc
from vllm_gptoss.kernels.attention import Plan, plan

PLANS = sorted(
    {plan(tokens, heads, window) for tokens in range(1, 17) for heads in (1, 2, 4, 8) for window in (0, 128)}, key=str
)


@pytest.mark.parametrize("of", PLANS, ids=str)
def test_clusters_are_portable_and_share_outputs_evenly(of: Plan) -> None:
    assert 1 <= of.splits <= attention.MAX_SPLITS
    assert (attention.GROUP * attention.HEAD) % of.splits == 0
    assert of.warps * 32 <= 1024


@pytest.mark.parametrize("of", PLANS, ids=str)
def test_every_visible_key_is_read_once(of: Plan) -> None:
    for keys in (0, 1, 15, 16, 17, 127, 128, 129, 640, 4097):
        low = max(0, keys - of.window) if of.window else 0
        share = math.ceil(math.ceil((keys - low) / of.splits) / 16) * 16
        seen: Counter[int] = Counter()
        for split in range(of.splits):
            begin = low + split * share
            end = min(keys, begin + share)
            for warp in range(of.warps):
                for base in range(begin + warp * 16, end, of.warps * 16):
                    seen.update(range(base, min(base + 16, end)))
        assert seen == Counter(range(low, keys))


def test_a_window_is_one_chunk_a_warp_and_never_split() -> None:
    for tokens in range(1, 17):
        of = plan(tokens, 8, 128)
        assert of.splits == 1
        assert of.warps * 16 == 128


def test_values_and_outputs_are_permuted_alike() -> None:
    # mma n-tile t, column n of lane group n holds value column 8n + t; its sums land in lane j as columns 2j and 2j + 1
    loaded = Counter(8 * group + t for group in range(8) for t in range(8))
    assert loaded == Counter(range(64))
    for t in range(8):
        for j in range(4):
            assert [8 * (2 * j) + t, 8 * (2 * j + 1) + t] == [16 * j + t, 16 * j + 8 + t]


def test_shapes_without_a_kernel_say_why() -> None:
    assert attention.unsupported(64, 8, 64, 16) is None
    assert attention.unsupported(8, 1, 64, 64) is None
    assert attention.unsupported(64, 8, 128, 16) == "head size 128, not 64"
    assert attention.unsupported(64, 4, 64, 16) == "64 query heads for 4 key/value heads, not 8 each"
    assert attention.unsupported(64, 8, 64, 48) == "cache blocks of 48 tokens, not a power of two"


def test_it_compiles_for_sm90_without_a_gpu() -> None:
    source = nvrtc.source(attention.SOURCE)
    for of in PLANS:
        cubin = nvrtc.compile_cubin(source, "sm_90", [f"-D{name}={value}" for name, value in of.macros.items()])
        assert b"attention_few" in cubin
