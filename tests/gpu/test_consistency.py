"""Weights that are replaced, moved or discarded while an engine runs: decode, prompts and float64 must agree after it.

Reloads are from a second checkpoint: stale weights of the same bytes would show nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import checkpoint, shapes
from benchmarks.consistency import VOCABULARY
from tests.gpu.marks import SM90, chosen
from vllm_gptoss.cli.bench.consistency import is_consistent

pytestmark = [
    *SM90,
    pytest.mark.slow,
    pytest.mark.alone,  # vLLM compares the memory of the whole GPU around a sleep
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM for CUDA"),
]

MEMORY = {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.1}
EAGER = {"enforce_eager": True, **MEMORY}
GRAPHS = {"compilation_config": {"cudagraph_capture_sizes": [1, 8, 40, 200]}, **MEMORY}
SIZES = (1, 8, 40, 200)
LIMIT = 0.15
"""A mean over 16 tokens with one exchanged expert (a difference of 1) is 0.07; stale weights gave 1.5 to 7."""
PREFETCH = {
    "offload_backend": "prefetch", "offload_group_size": 1, "offload_num_in_group": 1, "offload_prefetch_step": 1,
    "offload_params": ["qkv_proj", "o_proj"],
}  # fmt: skip
SOME = {"cpu_offload_gb": 0.2, "cpu_offload_params": ["qkv_proj", "o_proj", "router"]}
RELOADS = ("reload", "trainer", "partial")
COMMANDS = {True: ["benchmarks.consistency"], False: ["vllm_gptoss.cli", "bench", "consistency"]}
"""With float64, and without."""

ENGINES: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, str]]] = {
    "reloads, no graphs": (EAGER, RELOADS, {}),
    "reloads, graphs": (GRAPHS, RELOADS, {}),
    "sleep, no graphs": (EAGER, ("sleep1", "sleep2"), {}),
    "sleep, graphs": (GRAPHS, ("sleep1", "sleep2"), {}),
    "prefetch, no graphs": (EAGER | PREFETCH, (), {}),
    "prefetch, graphs": (GRAPHS | PREFETCH, (), {}),
    "UVA": (EAGER | SOME, (), {}),
    "UVA, every weight": (EAGER | {"cpu_offload_gb": 10}, (), {}),
    "copies": (EAGER | SOME, (), {"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1"}),
}
"""Engine arguments, operations in turn, environment."""


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Of each engine that the chosen tests name: two with operations at a time, because float64 takes 25 GiB for each,
    concurrently with two without. Engines that sleep run alone."""
    base = tmp_path_factory.mktemp("consistency")
    for seed, name in enumerate(("first", "second")):
        checkpoint.write(replace(shapes.shape("20b:2"), vocabulary=VOCABULARY), base / name, seed)

    def run(name: str) -> list[dict[str, Any]]:
        engine, after, environment = ENGINES[name]
        out = base / f"{name}.json"
        command = [
            sys.executable, "-m", *COMMANDS[bool(after)], "--model", str(base / "first"),
            "--reload-from", str(base / "second"), "--after", ",".join(after), "--engine", json.dumps(engine),
            "--concurrency", ",".join(map(str, SIZES)), "--limit", "9", "--out", str(out),
        ]  # fmt: skip
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return list(json.loads(out.read_text())["rows"])

    wanted = chosen(request, "name")
    asleep = [name for name in ENGINES if name in wanted and name.startswith("sleep")]
    awake = [name for name in ENGINES if name in wanted and name not in asleep]
    with ThreadPoolExecutor(2) as exact, ThreadPoolExecutor(2) as plain:
        pending = {name: (exact if ENGINES[name][1] else plain).submit(run, name) for name in awake}
    return {name: each.result() for name, each in pending.items()} | {name: run(name) for name in asleep}


@pytest.mark.parametrize("name", ENGINES)
def test_decode_prompts_and_float64_agree(name: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    wanted = [(after, size) for after in ("none", *ENGINES[name][1]) for size in SIZES]
    assert [(row["after"], row["requests"]) for row in rows[name]] == wanted
    assert [row for row in rows[name] if not is_consistent(row, LIMIT)] == []
