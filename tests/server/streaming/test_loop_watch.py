"""A blocked event loop shows in the metrics at once, and in the log if it is blocked for long."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from prometheus_client import REGISTRY

from vllm_gptoss.server.streaming.loop_watch import watch_loop


def pauses(longer_than: str) -> float:
    total = REGISTRY.get_sample_value("gptoss_event_loop_pause_seconds_count") or 0.0
    below = REGISTRY.get_sample_value("gptoss_event_loop_pause_seconds_bucket", {"le": longer_than}) or 0.0
    return total - below


async def test_a_pause_is_counted_and_a_long_one_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    watch = asyncio.create_task(watch_loop(tick_s=0.01, long_s=0.3))
    before = pauses("0.1")
    await asyncio.sleep(0.05)
    time.sleep(0.35)  # noqa: ASYNC251 - what is watched for
    await asyncio.sleep(0.05)
    watch.cancel()
    assert pauses("0.1") >= before + 1
    said = [record.getMessage() for record in caplog.records if "was blocked" in record.getMessage()]
    assert said
    assert "processor time" in said[0]


async def test_a_loop_that_runs_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    count = REGISTRY.get_sample_value("gptoss_event_loop_pause_seconds_count") or 0.0
    watch = asyncio.create_task(watch_loop(tick_s=0.01))
    await asyncio.sleep(0.3)
    watch.cancel()
    assert (REGISTRY.get_sample_value("gptoss_event_loop_pause_seconds_count") or 0.0) > count
    assert "was blocked" not in caplog.text
