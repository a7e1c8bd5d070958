"""The table of token bands: whole, in order, and never beyond what a kernel takes."""

from __future__ import annotations

import pytest

from vllm_gptoss.engine.choose import bands
from vllm_gptoss.engine.kernels import dense, experts_many, product_many


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
    assert bands.PRODUCT_TOKENS <= product_many.MAX_TOKENS
    assert all(max(experts_many.tunings_for(routed, 4)) >= bands.MANY_TOKENS for routed in (1, 16, 32, 128))
    assert bands.ONE_TOKEN == 1
