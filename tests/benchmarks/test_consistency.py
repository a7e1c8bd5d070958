"""Decode, prompts and float64 after operations on a CPU; and the offline command of the package on the same weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import checkpoint, consistency, shapes
from vllm_gptoss.cli.bench import operations
from vllm_gptoss.cli.bench.consistency import Completion
from vllm_gptoss.cli.main import app


def test_the_distance_from_float64_is_over_all_tokens_of_all_answers() -> None:
    answers = [Completion([1], [3, 3], [-1.0, -1.1], [-1.0, -1.0]), Completion([1], [3], [-0.5], [-1.0])]
    assert consistency.from_float64(answers, [-1.0, -1.0, -1.1]) == {
        "decode_float64_mean": pytest.approx(0.7 / 3), "decode_float64_median": pytest.approx(0.1),
        "decode_float64_max": pytest.approx(0.6), "prompt_float64_mean": pytest.approx(0.1 / 3),
        "prompt_float64_median": pytest.approx(0.0), "prompt_float64_max": pytest.approx(0.1),
    }  # fmt: skip


@pytest.mark.usefixtures("warm_engines")
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_reloaded_experts_are_the_ones_that_the_cpu_computes_with(tmp_path: Path) -> None:
    """vLLM packs the experts for a CPU when it makes their kernel, and never again."""
    for seed, name in enumerate(("first", "second")):
        checkpoint.write(dataclasses.replace(shapes.TINY, vocabulary=consistency.VOCABULARY), tmp_path / name, seed)
    exact, plain = typer.Typer(), ["bench", "consistency"]
    exact.command()(consistency.main)
    names = [name for name in operations.NAMES if not name.startswith("sleep")]
    for application, arguments, after in ((exact, [], names), (app, plain, ["reload"])):
        out = tmp_path / "rows.json"
        arguments += ["--model", str(tmp_path / "first"), "--reload-from", str(tmp_path / "second")]
        arguments += ["--engine", json.dumps({"enforce_eager": True, "kv_cache_memory_bytes": 2**28})]
        arguments += ["--after", ",".join(after), "--concurrency", "4", "--limit", "0.1", "--out", str(out)]
        done = CliRunner().invoke(application, arguments)
        assert done.exit_code == 0, done.output[-3000:]
        rows = json.loads(out.read_text())["rows"]
        assert [row["after"] for row in rows] == ["none", *after]
        assert len({row["weights"] for row in rows}) == 2, "a reload of the same bytes would show nothing"
        assert all(("decode_float64_mean" in row) is (application is exact) for row in rows)
