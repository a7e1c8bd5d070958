"""Settings of the API server's process."""

from __future__ import annotations

import pytest

from tests.support import warm


@pytest.mark.vllm
def test_the_collector_waits_and_variables_are_read_once() -> None:
    """In a separate process, because neither setting can be undone."""
    code = """
import gc, os
from vllm import envs
from vllm_gptoss.server.streaming import process_tuning as front
before = gc.get_threshold()
front.settle()
front.settle()
assert gc.get_threshold() == (front.YOUNG, *before[1:]), gc.get_threshold()
interval = envs.VLLM_LOG_STATS_INTERVAL
os.environ["VLLM_LOG_STATS_INTERVAL"] = "77"
assert envs.VLLM_LOG_STATS_INTERVAL == interval != 77
gc.set_threshold(50_000, *before[1:])
front.settle()
assert gc.get_threshold()[0] == 50_000, "what a user set higher stays"
"""
    done = warm.run(["-c", code])
    assert done.returncode == 0, done.stderr
