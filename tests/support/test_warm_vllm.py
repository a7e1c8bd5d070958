"""A program that starts with vLLM imported ends as any other program, and with the tests that started it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import warm_vllm
from tests.support.waiting import soon

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_it_says_how_it_ended_and_outlives_nobody(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        failed = warm_vllm.Process([sys.executable, "-m", "tests.support.nowhere"], stdout=log, env=os.environ)
        assert failed.wait(60) == 1
        assert "No module named tests.support.nowhere" in (tmp_path / "log").read_text()
        stays = [sys.executable, "-m", "http.server", "0"]
        killed, left = (warm_vllm.Process(stays, stdout=log, env=os.environ) for _ in range(2))
        assert killed.poll() is None
        killed.kill()
        assert killed.wait(60) == -9
        assert psutil.pid_exists(left.pid)
        left._line.close()
        soon(lambda: not psutil.pid_exists(left.pid), 60)
