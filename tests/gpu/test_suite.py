"""The record of a run on a GPU lists passed and failed tests, and the reasons of skipped ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import suite

TESTS = """
import pytest
def test_fine(): pass
def test_wrong(): assert False
@pytest.mark.skip(reason="needs a second GPU")
def test_aside(): pass
@pytest.fixture
def broken(): raise OSError
def test_error(broken): pass
"""


def test_a_report_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--junitxml=report.xml", "test_it.py"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120).returncode == 1
    record = suite.read(tmp_path / "report.xml")
    assert record["outcomes"] == {"passed": 1, "failure": 1, "skipped": 1, "error": 1}
    assert record["failed"] == ["test_it::test_wrong", "test_it::test_error"]
    assert record["skipped"] == {"needs a second GPU": 1}
    assert record["files"] == {"test_it": record["outcomes"]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_run() -> None:
    command = [sys.executable, "-m", "tests.gpu.suite"]
    done = subprocess.run(command, cwd=suite.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "`make test` runs what needs none" in done.stderr
