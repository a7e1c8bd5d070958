"""Risks of short time slices: they are not set, not set for all threads, or change priorities."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vllm_gptoss.engine.runner import slices

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
ASK = """
import os, threading
from vllm_gptoss.engine.runner import slices
go, asked = threading.Event(), threading.Event()
before = threading.Thread(target=go.wait)
before.start()
nice = os.nice(3)
was = slices.slice_of(0)
assert slices.ask_short() is None
after = threading.Thread(target=go.wait)
after.start()
print(was, *(slices.slice_of(thread) for thread in (before.native_id, os.getpid(), after.native_id)))
print(os.getpriority(os.PRIO_PROCESS, 0) == nice, os.sched_getscheduler(0) == os.SCHED_OTHER)
go.set()
"""


@LINUX
def test_every_thread_asks_and_keeps_its_priority() -> None:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    measured, kept = done.stdout.splitlines()
    was, *now = map(int, measured.split())
    assert now == [slices.SLICE_NS] * 3 if was else now == [0] * 3, "the kernel reports slices from Linux 6.12 on"
    assert kept == "True True"


@LINUX
def test_a_thread_that_ended_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: ["4194304"])  # more than any kernel's highest number
    assert slices.ask_short() is None


@LINUX
def test_a_refusal_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(slices, "_call", refuse)
    assert slices.ask_short() == "[Errno 1] Operation not permitted"


def test_another_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices.platform, "machine", lambda: "riscv64")
    assert "riscv64" in str(slices.ask_short())
