"""A fault of ours in a real engine on a GPU: it starts, captures and answers on upstream's path, and says so once."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.marks import SM90
from tests.gpu.start import BATCHES, TOKENS
from tests.support import planted

pytestmark = [
    *SM90,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM for CUDA"),
]
ROOT = Path(__file__).parents[2]
WHOLE = {"fused_layers": 2, "one_launch": 2, "own_experts": 2}


def start(where: str = "", **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu.start", json.dumps({"where": where, "settings": settings})]
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["tokens"] == [[TOKENS] * count for count in BATCHES]
    return dict(found["paths"])


def test_without_a_fault_everything_is_ours() -> None:
    done = start()
    assert answer(done) == WHOLE
    assert "upstream from here on" not in done.stdout + done.stderr


@pytest.mark.parametrize("where", planted.LAYERS)
def test_a_fault_of_the_layers_leaves_upstreams(where: str) -> None:
    if where.endswith("at_once"):
        pytest.skip("the experts compile by it too: below")
    done = start(where)
    assert answer(done) == {"fused_layers": 0, "one_launch": 0, "own_experts": 2}
    said = done.stdout + done.stderr
    assert said.count(f"layers: upstream from here on (RuntimeError: {planted.MESSAGE})") == 1


@pytest.mark.parametrize("where", planted.EXPERTS)
def test_a_fault_of_the_experts_leaves_upstreams(where: str) -> None:
    done = start(where)
    paths = answer(done)
    said = (done.stdout + done.stderr).count(f"experts: upstream from here on (RuntimeError: {planted.MESSAGE})")
    assert paths["own_experts"] == 0
    assert said == 1


def test_a_compiler_that_refuses_leaves_everything_to_upstream() -> None:
    assert answer(start("vllm_gptoss.kernels.nvrtc:at_once")) == dict.fromkeys(WHOLE, 0)


WISHES = [
    ("vllm_gptoss.describe:built_model", {"layers": "gptoss"}),
    ("vllm_gptoss.experts.sm90:sample", {"experts": "gptoss"}),
]


@pytest.mark.parametrize(("where", "settings"), WISHES)
def test_a_wish_ends_in_an_error_that_says_why(where: str, settings: dict[str, str]) -> None:
    done = start(where, **settings)
    assert done.returncode != 0
    [(part, _)] = settings.items()
    assert f"{part}=gptoss cannot run here: RuntimeError: {planted.MESSAGE}" in done.stdout + done.stderr
