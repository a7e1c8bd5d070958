"""Requests say the same, token for token, whichever way their steps go: our runner and scheduler, or vLLM's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu.either_way import KINDS
from tests.gpu.marks import SM90
from tests.support.places import ROOT

pytestmark = [
    *SM90,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM for CUDA"),
]

PLAIN = ["greedy", "seeded", "unseeded", "min_p"]


@pytest.mark.parametrize(
    "job",
    [
        {"blocks": 2000, "caching": False, "kinds": ["greedy"], "seed": 1},
        {"blocks": 2000, "caching": True, "kinds": PLAIN, "seed": 2},
        {"blocks": 250, "caching": True, "kinds": list(KINDS), "seed": 3, "rounds": 4},
    ],
    ids=["greedy", "plain sampling", "all sampling, preempted"],
)
def test_the_same_tokens_either_way(job: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "tests.gpu.either_way", json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["different"][:3] == []
    assert found["steps"]["short"] > 100, "hardly any step was ours"
    assert found["steps"]["preempted"] > 0 or job["blocks"] > 250, "too many blocks for this test"
