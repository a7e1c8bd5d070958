"""The phases of a start: seconds must go to the right phase, also where vLLM logs less or the same line twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from demo.server import ARGUMENTS, CPU, CPU_ENVIRONMENT, ENVIRONMENT
from tests.support import warm, warm_vllm
from vllm_gptoss.cli.bench import start
from vllm_gptoss.cli.main import app

SERVER = (
    (3, "(APIServer pid=7) INFO non-default args: {'model': 'm'}"),
    (5, start.ENGINE),
    (9, "(EngineCore pid=9) INFO Initializing a V1 LLM engine (v0.33.0) with config: model='m'"),
)
LOADED = (15, "(EngineCore pid=9) INFO Model loading took 13.1 GiB memory and 5.0 seconds")
RUN = (21, "(EngineCore pid=9) INFO Initial profiling/warmup run took 1.00 s")
PROFILED = (
    (10, "(EngineCore pid=9) INFO Loading model from scratch..."),
    (12, "(EngineCore pid=9) INFO Loading weights took 2.00 seconds"),
    LOADED,
    (20, "(EngineCore pid=9) INFO torch.compile took 5.00 s in total"),
    RUN,
    (22, "Capturing CUDA graphs (PIECEWISE):   0%|          | 0/83 [00:00<?, ?it/s]"),
    (24, "Capturing CUDA graphs (FULL):   0%|          | 0/2 [00:00<?, ?it/s]"),
    (25, "(EngineCore pid=9) INFO Graph capturing finished in 3 secs, took 0.5 GiB"),
    (26, "(EngineCore pid=9) INFO Available KV cache memory: 50 GiB"),
)
PLANNED = (LOADED, RUN, (26, "(EngineCore pid=9) INFO Initial free memory 78 GiB, and skipped memory profiling."))
REST = (
    (27, "(EngineCore pid=9) INFO GPU KV cache size: 1,000 tokens, Maximum concurrency"),
    (30, "Capturing CUDA graphs (PIECEWISE):   0%|          | 0/83 [00:00<?, ?it/s]"),
    (33, "Capturing CUDA graphs (FULL):   0%|          | 0/35 [00:00<?, ?it/s]"),
    (40, "(EngineCore pid=9) INFO Graph capturing finished in 10 secs, took 0.6 GiB"),
    (41, "(EngineCore pid=9) INFO init engine (profile, create kv cache, warmup model) took 26.00 s"),
    (44, "(APIServer pid=7) INFO Supported tasks: ['generate']"),
    (50, "(APIServer pid=7) INFO Starting vLLM server on http://127.0.0.1:1"),
    (51, "INFO:     Application startup complete."),
)


@pytest.mark.parametrize(
    ("middle", "expected"),
    [
        (PROFILED, {"weights": 2, "torch.compile": 5, "graphs for the memory estimate": 3, "memory profile": 1}),
        (PLANNED, {"layout of the weights": 6, "profiling run": 6, "memory profile": 5}),
    ],
    ids=["profiled", "with a start-up plan and dummy weights"],
)
def test_each_second_belongs_to_one_phase(middle: tuple[tuple[int, str], ...], expected: dict[str, float]) -> None:
    found = start.phases([*SERVER, *middle, *REST])
    expected = expected | {"imports of the engine": 4, "warm-up": 3, "graphs": 10, "routes and tools": 6}
    assert expected == {name: found[name] for name in expected}
    assert sum(found.values()) == 51


def warm_popen(command: list[str], **options: Any) -> Any:
    """`subprocess.Popen` with a pipe for the output, of a server that starts with vLLM imported."""
    reads, writes = os.pipe()
    with os.fdopen(writes, "w") as out:
        process = warm_vllm.popen(command, **{**options, "stdout": out, "text": False, "errors": None})
    process.stdout = os.fdopen(reads, errors="replace")
    process.communicate = lambda: (process.stdout.read(), process.wait())
    return process


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`vllm-gptoss bench start` in this process."""
    warm.run(["-c", "pass"])  # the process from which servers are forked runs
    for name, value in (ENVIRONMENT | CPU_ENVIRONMENT | {"COLUMNS": "400"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "subprocess", SimpleNamespace(**{**vars(start.subprocess), "Popen": warm_popen}))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["bench", "start", *arguments])

    return run


@pytest.mark.vllm
@pytest.mark.slow
def test_a_start_on_a_cpu_is_divided_into_phases(bench: Any, model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "start.json"
    done = bench(str(model_dir), "--variant", "plugin", "--out", str(out), "--", *ARGUMENTS, *CPU)
    assert done.exit_code == 0, done.output[-3000:]
    (row,) = json.loads(out.read_text())["rows"]
    optional = {name for name, _, is_always_logged in start.PHASES if not is_always_logged}
    assert [name for name in row["phases"] if name not in optional] == [n for n, _, always in start.PHASES if always]
    assert row["phases"]["weights"] > 0
    assert sum(row["phases"].values()) == pytest.approx(row["seconds"])
    assert min(row["phases"].values()) > -0.5, "a process is dated at once, a line when it arrives"
    assert min(row["processor_seconds"]) > 0.1


@pytest.mark.vllm
@pytest.mark.slow
def test_a_server_that_ends_is_an_error_with_its_log(bench: Any) -> None:
    done = bench("/nowhere", "--", "--no-such-flag")
    assert done.exit_code == 2
    assert "--no-such-flag" in done.output.partition("vllm serve did not start")[2]
