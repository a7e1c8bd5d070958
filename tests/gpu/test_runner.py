"""Requests get the same tokens with our runner and scheduler as with vLLM's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.gpu.either_way import KINDS, PLAIN, PLANTS, last_line
from tests.gpu.marks import SM90
from tests.support.places import ROOT

pytestmark = [
    *SM90,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM for CUDA"),
]


@pytest.mark.parametrize(
    "job",
    [
        {"blocks": 2000, "caching": False, "kinds": ["greedy"], "seed": 1},
        {"blocks": 2000, "caching": True, "kinds": PLAIN, "seed": 2},
        {"blocks": 2000, "caching": True, "kinds": ["greedy", "seeded", "stops"], "seed": 4, "drafts": 3},
        {"blocks": 250, "caching": False, "kinds": ["greedy", "seeded"], "seed": 5, "drafts": 7},
        {"blocks": 250, "caching": True, "kinds": list(KINDS), "seed": 3, "rounds": 4, "plants": list(PLANTS)},
        {"blocks": 2000, "caching": True, "kinds": PLAIN, "seed": 6, "ranks": 2},
        {"blocks": 250, "caching": True, "kinds": list(KINDS), "seed": 7, "rounds": 4, "ranks": 2},
        {"blocks": 2000, "caching": True, "kinds": ["greedy", "seeded", "stops"], "seed": 8, "drafts": 3, "ranks": 2},
        {"blocks": 250, "caching": True, "kinds": list(KINDS), "seed": 9, "ranks": 4},
        {"blocks": 250, "caching": True, "kinds": list(KINDS), "seed": 10, "ranks": 8},
    ],
    ids=[
        "greedy",
        "plain sampling",
        "drafts",
        "drafts, preempted",
        "all sampling, preempted, planted faults",
        "two GPUs",
        "two GPUs, all sampling, preempted",
        "two GPUs, drafts",
        "four GPUs",
        "eight GPUs",
    ],
)
def test_the_same_tokens_either_way(job: dict[str, Any]) -> None:
    """On several GPUs each rank also goes its own way."""
    if torch.cuda.device_count() < job.get("ranks", 1):
        pytest.skip(f"needs {job['ranks']} GPUs")
    found = run(json.dumps({**job, "tokenizer": os.environ.get("GPTOSS_TEST_TOKENIZER")}))
    assert found["different"][:3] == []
    assert len(found["ranks"]) == job.get("ranks", 1)
    assert min(steps["short"] for steps in found["ranks"]) > 100, "hardly any step took the plugin's path"
    if job["blocks"] <= 250:
        assert found["steps"]["preempted"] > 0, "too many blocks for this test"
    if "plants" in job:
        assert found["steps"]["with a grammar"] > 0, "no step with a grammar took the plugin's path"
        assert [name for name, changed in found["planted"].items() if not changed] == [], found["planted"]


def run(*arguments: str) -> dict[str, Any]:
    """What `either_way` found. An engine starts for 80 s on a machine that never ran vLLM, then it takes 15."""
    command = [sys.executable, "-m", "tests.gpu.either_way", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    found = last_line(done.stdout)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
    assert found is not None, done.stdout[-5000:]
    return found
