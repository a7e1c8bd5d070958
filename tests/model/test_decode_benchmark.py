"""The benchmark's own arithmetic: a wrong floor, union or choice of the best stock backend would be a wrong claim."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_gptoss.bench import decode


def test_overlapping_kernels_count_once() -> None:
    assert decode.busy_ns([(10, 11), (0, 5), (3, 8)]) == 9
    assert decode.busy_ns([(0, 10), (2, 3)]) == 10
    assert decode.busy_ns([]) == 0


@pytest.mark.parametrize(
    ("model", "batch", "floor"),
    # bytes over 4.3 TB/s worked out by hand for 1,024 tokens of context, see docs/kernels.md
    [("20b", 1, 0.87), ("20b", 8, 2.17), ("120b", 1, 1.17), ("120b", 8, 3.98)],
)
def test_the_floor_is_what_must_be_read(model: str, batch: int, floor: float) -> None:
    assert decode.floor_ms(decode.SPECS[model], batch, 1024) == pytest.approx(floor, abs=0.005)


def test_skewed_routing_reads_four_experts_at_any_batch() -> None:
    model = decode.SPECS["20b"]
    uniform, skewed = (decode.floor_ms(model, 16, 1, skew=skew) for skew in (False, True))
    assert skewed == pytest.approx(decode.floor_ms(model, 1, 16), rel=1e-3)
    assert uniform > 2 * skewed


def test_plugin_is_held_against_the_best_stock_backend_of_each_batch() -> None:
    def process(*tpots: float) -> dict[str, Any]:
        return {"rows": [{"batch": 1, "tpot_ms": [tpot]} for tpot in tpots]}

    job = decode.Job("20b", "plugin", (1, 8), 512, 128, 1, 1, False, False, {})
    rows = decode.summarise(
        {
            ("20b", "plugin"): [process(1.5, 3.0), process(1.7, 3.2)],
            ("20b", "triton"): [process(3.0, 4.8)],
            ("20b", "marlin"): [process(2.8, 4.9)],
        },
        job,
    )
    assert [(row["batch"], row["stock_backend"], row["stock_tpot_ms"]) for row in rows] == [
        (1, "marlin", 2.8),
        (8, "triton", 4.8),
    ]
    assert rows[0]["plugin_tpot_ms"] == pytest.approx(1.6)
    assert rows[0]["plugin_spread"] == pytest.approx(0.2 / 1.6)
    assert rows[1]["tokens_per_s_gpu"] == pytest.approx(8e3 / 3.1)
