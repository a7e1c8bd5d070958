"""A sandbox that does not answer is an error, and a cancelled spawn leaves no process behind."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.support.waiting import until
from vllm_gptoss.tools.python import PythonOptions
from vllm_gptoss.tools.python.jupyter import make_namespaces
from vllm_gptoss.tools.sandbox import launcher, wire


async def test_a_request_that_is_not_answered_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_REPLY_S", 0.1)
    ours, theirs = wire.pair()
    channel = launcher.SandboxChannel(ours, lambda message, fds: None)
    with theirs, pytest.raises(launcher.SandboxError, match="did not answer 'usage' in 0 s"):
        await channel.request("usage")
    channel.close()


@pytest.mark.namespaces
async def test_a_cancelled_spawn_leaves_no_cage() -> None:
    made: Any = await make_namespaces(PythonOptions(preload=[]))
    before = set(psutil.Process().children(recursive=True))
    entered, left = threading.Event(), threading.Event()
    made._cgroups = SimpleNamespace(leaf=lambda limits: entered.set() or left.wait(10))
    spawning = asyncio.create_task(made.spawn())
    await until(entered.is_set)
    spawning.cancel()
    left.set()
    with pytest.raises(asyncio.CancelledError):
        await spawning
    await until(lambda: not set(psutil.Process().children(recursive=True)) - before)
    await made.aclose()
