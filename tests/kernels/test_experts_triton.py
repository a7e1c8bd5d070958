"""The portable expert kernels: arithmetic in Triton's interpreter, and that every architecture compiles them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: str, **environment: str) -> str:
    """In a process of its own: Triton reads TRITON_INTERPRET once, at import. Measured where the tests are."""
    measured = ["coverage", "run", "--parallel-mode", "-m"] if coverage.Coverage.current() else []
    done = subprocess.run(
        [sys.executable, "-m", *measured, module, *arguments],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_few_tokens_skew_and_absent_experts_match_float64() -> None:
    assert len(run("tests.kernels.interpreted", TRITON_INTERPRET="1").splitlines()) == 4


@pytest.mark.parametrize(
    "target",
    [("cuda", "80", "32"), ("cuda", "89", "32"), ("cuda", "90", "32"), ("cuda", "100", "32"), ("cuda", "120", "32"),
     ("hip", "gfx942", "64"), ("hip", "gfx950", "64")],
    ids=lambda target: target[1],
)  # fmt: skip
def test_every_kernel_compiles_without_a_gpu(target: tuple[str, str, str], tmp_path: Path) -> None:
    said = run("tests.kernels.compiled", *target, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    made = dict(line.split() for line in said.splitlines())
    assert set(made) == {"up", "down", "combine"}
    assert all(int(size) > 1000 for size in made.values()), "code for a GPU, not an empty shell"
