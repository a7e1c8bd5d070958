"""A sandbox that does not answer is an error, and a cancelled spawn leaves no process behind."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.support.waiting import until
from vllm_gptoss.tools.python import PythonOptions
from vllm_gptoss.tools.python.jupyter import make_bubblewrap, make_namespaces
from vllm_gptoss.tools.sandbox import bubblewrap, launcher, wire


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


async def test_a_start_that_is_cancelled_while_bubblewrap_says_nothing_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        silent = Path(folder, "bwrap")
        silent.write_text("#!/bin/sh\nexec sleep 60")
        for path in (silent, silent.parent):  # as root another user runs it
            path.chmod(0o755)
        monkeypatch.setattr(bubblewrap, "find", lambda: str(silent))
        before = set(psutil.Process().children())
        starting = asyncio.create_task(make_bubblewrap(PythonOptions(preload=[])))
        await until(lambda: any(each.name() == "sleep" for each in set(psutil.Process().children()) - before))
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await until(lambda: not set(psutil.Process().children()) - before)
