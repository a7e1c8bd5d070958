"""Break-even compares alike: the newest rows of the plugin, with the same work, on the same GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import drafts


def row(tpot: float | None, count: int = 0, **changes: Any) -> dict[str, Any]:
    base = {"model": "120b", "batch": 32, "prompt": 512, "output": 128, "tensor_parallel": 1, "skew": False}
    base |= {"eagle3": count, "accepted": 2.4 if count else None, "options": {}, "plugin": "plugin"}
    return {**base, "plugin_tpot_ms": tpot, **changes}


def file(day: int, *rows: dict[str, Any], gpu: str = "NVIDIA H200") -> dict[str, Any]:
    return {"gpu": gpu, "date": f"2026-11-{day}", "file": f"{day}-{gpu}", "rows": rows}


PLAIN, DRAFTED = file(27, row(12.0)), file(28, row(8.0, 3))
CASES: dict[str, tuple[list[dict[str, Any]], list[tuple[float, float, float]]]] = {
    "two files": ([PLAIN, DRAFTED], [(12.0, 8.0, 1.6)]),
    "the newest plain row": ([file(26, row(6.0)), PLAIN, DRAFTED], [(12.0, 8.0, 1.6)]),
    "the plain row of the same file": ([file(28, row(16.0), row(8.0, 3)), file(29, row(12.0))], [(16.0, 8.0, 1.2)]),
    "the newest drafts": ([PLAIN, DRAFTED, file(29, row(10.0, 3))], [(12.0, 10.0, 2.0)]),
    "the fastest variant": (
        [PLAIN, file(28, row(9.0, 3), row(8.0, 3, plugin="plugin:host=stock"))],
        [(12.0, 8.0, 1.6)],
    ),
    "other sizes of memory": ([PLAIN, file(28, row(8.0, 3, options={"gpu_memory_utilization": 0.94}))], [(12, 8, 1.6)]),
    "none accepted": ([PLAIN, file(28, row(18.0, 3, accepted=None))], [(12.0, 18.0, 1.5)]),
    "each number of drafts": ([PLAIN, file(28, row(8.0, 3), row(9.0, 7))], [(12.0, 8.0, 1.6), (12.0, 9.0, 1.8)]),
    "no plain row": ([DRAFTED], []),
    "a file without rows": ([{"gpu": "NVIDIA H200"}], []),
}
OTHERS = {"batch": 64, "model": "20b", "tensor_parallel": 2, "prompt": 8192, "output": 256, "skew": True}
CASES |= {f"plain row of other {key}": ([file(27, row(12.0, **{key: OTHERS[key]})), DRAFTED], []) for key in OTHERS}
CASES |= {
    "plain row of another GPU": ([file(27, row(12.0), gpu="NVIDIA H100 80GB HBM3"), DRAFTED], []),
    "plain row of other options": ([file(27, row(12.0, options={"kv_cache_dtype": "fp8"})), DRAFTED], []),
    "plain row of an old version": ([file(27, row(12.0, plugin="plugin of dd90c28")), DRAFTED], []),
    "plain row that was not measured": ([file(27, row(None)), DRAFTED], []),
    "drafts of a shortened model": ([PLAIN, file(28, row(8.0, 3, model="120b:8"))], []),
}


@pytest.mark.parametrize(("files", "figures"), CASES.values(), ids=CASES)
def test_alike_rows_are_compared(files: list[dict[str, Any]], figures: list[tuple[float, float, float]]) -> None:
    found = drafts.compared(files)
    assert [(each["plain_ms"], each["drafts_ms"], each["break_even"]) for each in found] == figures
    assert {each["device"] for each in found} <= {"H200"}
