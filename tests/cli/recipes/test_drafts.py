"""Advice about drafts is of measured rows of that model, those GPUs and drafts; other cases are not measured."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_gptoss.cli.recipes import drafts
from vllm_gptoss.cli.recipes.schema import SPECS
from vllm_gptoss.engine.choose import devices

KEYS = ("model", "device", "gpus", "requests", "drafts", "break_even")
ROWS = [
    ("20b", "H200", 1, 1, 7, 2.5),
    ("120b", "H200", 1, 1, 7, 2.0),
    ("120b", "H200", 1, 32, 3, 1.6),
    ("120b", "H200", 1, 128, 3, 1.5),
    ("120b", "H200", 2, 32, 3, 1.7),
]
SEVEN = "7 pay above 2.00 tokens per step with 1 at once"
FEW = "3 pay above 1.60 tokens per step with 32 at once"
MANY = "3 pay above 1.50 tokens per step with 128 at once"
EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 3}


def not_measured(what: str) -> list[str]:
    return [f"not measured for gpt-oss-{what}: docs/guide.md shows how to measure"]


def with_drafts(**changes: Any) -> dict[str, Any]:
    return {"speculative-config": EAGLE3 | changes}


CASES: dict[str, tuple[str, dict[str, Any], int, float | None, list[str]]] = {
    "all sizes": ("H200", {}, 0, None, [SEVEN, FEW, MANY]),
    "these drafts": ("H200", with_drafts(), 0, None, [FEW, MANY]),
    "a measured size": ("H200", {}, 32, None, [FEW]),
    "the least size": ("H200", with_drafts(num_speculative_tokens=7), 1, None, [SEVEN]),
    "between sizes": ("H200", {}, 33, None, [FEW, MANY]),
    "between sizes of other drafts": ("H200", with_drafts(), 8, None, not_measured("120b on H200 with 8 at once")),
    "above all sizes": ("H200", with_drafts(), 129, None, not_measured("120b on H200 with 129 at once")),
    "below break-even": ("H200", {}, 32, 1.52, [f"{FEW}; 1.52 do not pay: 0.95 times the speed"]),
    "at break-even": ("H200", {}, 32, 1.6, [f"{FEW}; 1.60 change nothing: 1.00 times the speed"]),
    "above break-even": ("H200", {}, 32, 2.4, [f"{FEW}; 2.40 pay: 1.50 times the speed"]),
    "two GPUs": (
        "2xH200",
        {"tensor-parallel-size": 2},
        0,
        None,
        ["3 pay above 1.70 tokens per step with 32 at once"],
    ),
    "two replicas": ("2xH200", with_drafts() | {"data-parallel-size": 2}, 0, None, not_measured("120b on 2xH200")),
    "another GPU": ("H100", with_drafts(), 0, None, not_measured("120b on H100")),
    "another GPU, tokens per step given": ("H100", {}, 0, 2.4, not_measured("120b on H100")),
    "another GPU without drafts": ("H100", {}, 0, None, []),
    "a GPU without a row": ("V100", {}, 0, None, []),
    "another number of drafts": ("H200", with_drafts(num_speculative_tokens=5), 0, None, not_measured("120b on H200")),
    "another method": ("H200", with_drafts(method="dflash"), 0, None, not_measured("120b on H200")),
    "an fp8 cache": ("H200", with_drafts() | {"kv-cache-dtype": "fp8"}, 0, None, not_measured("120b on H200")),
}


@pytest.mark.parametrize(("device", "config", "users", "accepted", "lines"), CASES.values(), ids=CASES)
def test_advice_is_of_measured_rows_alone(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    config: dict[str, Any],
    users: int,
    accepted: float | None,
    lines: list[str],
) -> None:
    monkeypatch.setattr(drafts, "measured", lambda: [dict(zip(KEYS, row, strict=True)) for row in ROWS])
    assert drafts.advice(SPECS["120b"], devices.named(device), config, users, accepted) == lines


def test_rows_that_ship_are_of_devices_and_models_with_names() -> None:
    rows = drafts.measured()
    assert rows
    for row in rows:
        assert devices.named(row["device"]).name == row["device"]
        assert row["model"] in SPECS
