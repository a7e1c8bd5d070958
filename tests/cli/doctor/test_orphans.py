"""An engine that outlived its server is found and named; one that has its server is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from vllm_gptoss.cli.doctor import Status, findings
from vllm_gptoss.cli.doctor.orphans import orphans

SERVER = """
import os, sys, time
import setproctitle
{imports}
if not os.fork():
    setproctitle.setproctitle("VLLM::EngineCore")
    print(os.getpid(), flush=True)
    time.sleep(120)
time.sleep(120)
"""

pytestmark = pytest.mark.vllm  # which brings setproctitle and torch


@contextmanager
def server(folder: Path, imports: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Something that has forked what calls itself as vLLM's engine does."""
    script = folder / "server.py"
    script.write_text(SERVER.format(imports=imports))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        engine = psutil.Process(int(process.stdout.readline()))
        try:
            yield process, engine.pid
        finally:
            process.kill()
            engine.kill()


def found(engine: int) -> bool:
    return engine in [orphan.pid for orphan in orphans()]


def test_an_engine_whose_server_was_killed_is_found_with_what_it_holds(tmp_path: Path) -> None:
    with server(tmp_path) as (process, engine):
        process.kill()
        process.wait()
        (orphan,) = (orphan for orphan in orphans() if orphan.pid == engine)
        assert orphan.memory > 0
        finding = next(each for each in findings.orphaned_engines() if str(engine) in each.detail)
        assert finding.status in (Status.WARNING, Status.PROBLEM)
        assert f"kill {engine}" in finding.fix
        assert "VLLM::EngineCore" in finding.detail


def test_an_engine_of_a_living_server_or_script_is_none(tmp_path: Path) -> None:
    with server(tmp_path, imports="import torch") as (_, engine):
        assert not found(engine)


def test_an_engine_that_somebody_adopted_is_one(tmp_path: Path) -> None:
    """In a container pid 1 is often a supervisor written in Python."""
    with server(tmp_path) as (_, engine):
        assert found(engine)
