"""The table of token bands: whole, in order, and never beyond what a kernel takes."""

from __future__ import annotations

import pytest

from vllm_gptoss.engine.choose import bands
from vllm_gptoss.engine.kernels import attention_many, dense, experts_many, product_many


@pytest.mark.parametrize(
    ("tokens", "layers", "experts"),
    [
        (1, "one launch", "gptoss"),
        (2, "six launches", "gptoss"),
        (16, "six launches", "gptoss"),
        (17, bands.ALL_OURS, "gptoss"),
        (32, bands.ALL_OURS, "gptoss"),
        (33, bands.AROUND, "gptoss"),
        (64, bands.AROUND, "gptoss"),
        (512, bands.AROUND, "gptoss"),
        (513, "upstream", "gptoss"),
        (100_000, "upstream", "gptoss"),
    ],
)
def test_what_runs_a_step(tokens: int, layers: str, experts: str) -> None:
    band = bands.of(tokens)
    assert (band.layers, band.experts) == (layers, experts)


def test_bands_rise_and_the_last_takes_any_number() -> None:
    most = [band.most for band in bands.SM90]
    assert most[-1] is None
    assert most[:-1] == sorted(set(most[:-1]))  # type: ignore[type-var]


def test_no_band_is_wider_than_its_kernel() -> None:
    assert bands.FUSED_TOKENS <= dense.MAX_TOKENS
    assert bands.FUSED_TOKENS < bands.ATTENTION_TOKENS <= attention_many.MAX_TOKENS
    assert bands.PRODUCT_TOKENS <= product_many.MAX_TOKENS
    assert all(max(experts_many.tunings_for(routed, 4)) >= bands.MANY_TOKENS for routed in (1, 16, 32, 128))
    assert bands.ONE_TOKEN == 1


def test_padding_to_a_graph_crosses_no_band_and_no_kernel_of_the_experts() -> None:
    ends = [band.most for band in bands.SM90[:-1]]
    ends += [most for most in experts_many.tunings_for(32, 4) if most <= max(bands.GRAPHS)]
    assert set(ends) <= set(bands.GRAPHS)
    assert list(bands.GRAPHS) == sorted(set(bands.GRAPHS))


@pytest.mark.parametrize(
    ("requests", "tokens", "own", "largest"),
    [(1024, 8192, 1024, 1024), (100, 8192, 100, 1024), (1, 1, 1, 1), (64, 700, 700, 700), (2048, 16384, 1024, 1024)],
)
def test_the_largest_steps_have_a_graph(requests: int, tokens: int, own: int, largest: int) -> None:
    sizes = bands.graph_sizes(requests, tokens)
    assert own in sizes
    assert sizes[-1] == largest


def test_steps_are_padded_little_more_than_by_vllm() -> None:
    theirs = [1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16)]
    for tokens in range(1, 1025):
        ours, stock = (next(size for size in sizes if size >= tokens) for sizes in (bands.GRAPHS, theirs))
        assert ours <= stock if tokens <= 256 else ours - tokens <= 0.125 * tokens
