"""A planted fault in a real engine on a GPU: it starts, captures and answers with vLLM's path, and logs it once."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.marks import SM90
from tests.gpu.start import BATCHES, TOKENS
from tests.support import planted

pytestmark = [
    *SM90,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM for CUDA"),
]
ROOT = Path(__file__).parents[2]
WHOLE = {"fused_layers": 2, "one_launch": 2, "many_tokens": 2, "own_experts": 2}
SIDE_BY_SIDE = 5
"""Engines at once: two layers each, but all compile."""

COMPILER = "vllm_gptoss.engine.kernels.nvrtc:at_once"
EXPERTS = (*planted.EXPERTS, *planted.EXPERTS_ON_A_GPU)
LAYERS = [where for where in planted.LAYERS if where != COMPILER]  # the experts compile by it too
WISHES: list[tuple[str, dict[str, str]]] = [
    ("vllm_gptoss.engine.choose.vllm_config:built_model", {"layers": "gptoss"}),
    ("vllm_gptoss.engine.experts.sm90:sample", {"experts": "gptoss"}),
]
STARTS: list[tuple[str, dict[str, str]]] = [
    *((where, {}) for where in ("", COMPILER, *LAYERS, *planted.MANY, *EXPERTS, *planted.ATTENTION)),
    *WISHES,
]
Done = subprocess.CompletedProcess[str]


def start(where: str, settings: dict[str, str]) -> Done:
    command = [sys.executable, "-m", "tests.gpu.start", json.dumps({"where": where, "settings": settings})]
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def starts(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, bool], Done]]:
    """The output of the starts that the chosen tests need, by the location of its fault and the requested part."""
    here = [item for item in request.session.items if item.path == request.path]
    chosen = {item.callspec.params["where"] if hasattr(item, "callspec") else "" for item in here}
    wanted = [each for each in STARTS if each[0] in chosen or each[0] == COMPILER]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        done = pool.map(lambda each: start(*each), wanted)
        yield {(where, bool(settings)): each for (where, settings), each in zip(wanted, done, strict=True)}


def answer(done: Done) -> dict[str, Any]:
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]  # vLLM's own may come after
    found: dict[str, Any] = json.loads(lines[-1])
    assert found["tokens"] == [[TOKENS] * count for count in BATCHES]
    return dict(found["paths"])


def test_without_a_fault_everything_is_ours(starts: dict[tuple[str, bool], Done]) -> None:
    done = starts["", False]
    assert answer(done) == WHOLE
    assert "upstream from here on" not in done.stdout + done.stderr


@pytest.mark.parametrize("where", LAYERS)
def test_a_fault_of_the_layers_leaves_upstreams(where: str, starts: dict[tuple[str, bool], Done]) -> None:
    done = starts[where, False]
    assert answer(done) == {"fused_layers": 0, "one_launch": 0, "many_tokens": 0, "own_experts": 2}
    said = done.stdout + done.stderr
    assert said.count(f"layers: upstream from here on (RuntimeError: {planted.MESSAGE})") == 1


@pytest.mark.parametrize("where", EXPERTS)
def test_a_fault_of_the_experts_leaves_upstreams(where: str, starts: dict[tuple[str, bool], Done]) -> None:
    done = starts[where, False]
    paths = answer(done)
    said = (done.stdout + done.stderr).count(f"experts: upstream from here on (RuntimeError: {planted.MESSAGE})")
    assert paths["own_experts"] == 0
    assert said == 1


@pytest.mark.parametrize("where", planted.ATTENTION)
def test_a_fault_of_attention_leaves_flash_attention(where: str, starts: dict[tuple[str, bool], Done]) -> None:
    """Our layers of many tokens run the same kernel: where it fails they step aside too."""
    done = starts[where, False]
    assert answer(done) == WHOLE | ({"many_tokens": 0} if "attention_many" in where else {})
    said = done.stdout + done.stderr
    assert said.count(f"attention: upstream from here on (RuntimeError: {planted.MESSAGE})") == 1


@pytest.mark.parametrize("where", planted.MANY)
def test_a_fault_of_the_layers_of_many_tokens_leaves_the_others(
    where: str, starts: dict[tuple[str, bool], Done]
) -> None:
    done = starts[where, False]
    assert answer(done) == {**WHOLE, "many_tokens": 0}
    said = done.stdout + done.stderr
    assert said.count(f"layers of many tokens: upstream from here on (RuntimeError: {planted.MESSAGE})") == 1


def test_a_compiler_that_refuses_leaves_everything_to_upstream(starts: dict[tuple[str, bool], Done]) -> None:
    assert answer(starts[COMPILER, False]) == dict.fromkeys(WHOLE, 0)


@pytest.mark.parametrize(("where", "settings"), WISHES)
def test_a_wish_ends_in_an_error_that_says_why(
    where: str, settings: dict[str, str], starts: dict[tuple[str, bool], Done]
) -> None:
    done = starts[where, True]
    assert done.returncode != 0
    [(part, _)] = settings.items()
    assert f"{part}=gptoss cannot run here: RuntimeError: {planted.MESSAGE}" in done.stdout + done.stderr
