"""A server killed by a signal takes its engine and workers with it: they would keep the memory."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from demo.server import NAME, serve
from vllm_gptoss.doctor.orphans import orphans

pytestmark = [pytest.mark.vllm, pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(600)]

ARGUMENTS = ("--served-model-name", NAME, "--max-model-len", "2048", "--max-num-seqs", "4", "--enforce-eager")
WITH_WORKER = ("--distributed-executor-backend", "mp")
WITHIN_S = 60  # ten until it is killed, and what a busy machine takes to let go of it


def test_engine_and_workers_end_with_the_killed_server(model_dir: Path, tmp_path: Path) -> None:
    """Spawned, as vLLM does on a CPU whatever VLLM_WORKER_MULTIPROC_METHOD says; tests/test_parent_death.py forks."""
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    with serve(model_dir, tmp_path / "log", WITH_WORKER, environment, base_arguments=ARGUMENTS) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        names = {child.pid: " ".join(child.cmdline()) for child in children}
        engines = [child for child in children if "::" in names[child.pid]]
        assert sum("EngineCore" in names[engine.pid] for engine in engines) == 1, names
        assert sum("::Worker" in names[engine.pid] for engine in engines) == 1, names
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        began = time.monotonic()
        _, alive = psutil.wait_procs(engines, timeout=WITHIN_S)
        assert not alive, f"still there after {time.monotonic() - began:.0f} s: {[names[each.pid] for each in alive]}"
        assert not {each.pid for each in engines} & {orphan.pid for orphan in orphans()}
