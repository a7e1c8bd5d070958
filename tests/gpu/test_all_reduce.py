"""Two processes on two GPUs sum by push: eager, in graphs of several sizes, and where one of them is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.marks import SM90
from tests.gpu.push_rank import PATIENCE_S, RANKS

pytestmark = [
    *SM90,
    pytest.mark.timeout(180),
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs"),
]


def ranks(folder: Path, mode: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.gpu.push_rank"]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(folder), mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    return [json.loads(out.splitlines()[-1]) if out else {"error": errors[-3000:]} for out, errors in said]


def test_all_ranks_have_the_sum_after_calls_of_any_size(tmp_path: Path) -> None:
    assert ranks(tmp_path, "sums") == [{"wrong": 0, "unlike": 0}] * RANKS


def test_a_rank_that_waits_in_vain_ends(tmp_path: Path) -> None:
    waits, _ = ranks(tmp_path, "alone")
    assert PATIENCE_S <= waits["seconds"] < PATIENCE_S + 20, waits
