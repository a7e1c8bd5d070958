"""Recipes start: their flags, shrunk to a CPU and the small model, with real `vllm serve`; one question is answered."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest

from demo.server import NAME, Server, serve
from tests.support import warm_vllm
from tests.support.scale import SOAK
from vllm_gptoss.cli.recipes import load, render
from vllm_gptoss.cli.recipes.schema import Recipe
from vllm_gptoss.engine.choose.device import detect

pytestmark = [pytest.mark.vllm, pytest.mark.serve, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "additional-config",
    "attention-backend",
    "compilation-config",
    "data-parallel-size",
    "enable-expert-parallel",
    "gpu-memory-utilization",
    "kv-offloading-size",
    "speculative-config",
    "tensor-parallel-size",
} | ({"kv-cache-dtype"} if detect().features.isdisjoint({"amx", "avx512"}) else set())
"""Flags of hardware that is not here, or of a head that would be fetched. A CPU without AVX-512 has no FP8 KV cache."""


def here(recipe: Recipe) -> frozenset[str]:
    """Flags of a recipe that a CPU can serve."""
    return frozenset(recipe.config) - ELSEWHERE - {"model"}


def distinct() -> list[Recipe]:
    """One recipe for each set of flags that no other contains; first those that bring the most flags."""
    sets: dict[frozenset[str], Recipe] = {}
    for recipe in load.shipped():
        sets.setdefault(here(recipe), recipe)
    largest = [recipe for flags, recipe in sets.items() if not any(flags < other for other in sets)]
    ordered: list[Recipe] = []
    while largest:
        seen = frozenset().union(*map(here, ordered))
        largest.sort(key=lambda recipe: len(here(recipe) - seen), reverse=True)
        ordered.append(largest.pop(0))
    return ordered


RECIPES = distinct()
"""`make soak` starts each, 35 s on 2 cores; `make test` one server with the flags of all."""
SHRUNK = {"max-model-len": 16_384, "max-num-batched-tokens": 2048, "max-num-seqs": 32, "max-cudagraph-capture-size": 32}


def shrunk(config: dict[str, Any]) -> list[str]:
    small = {key: min(value, SHRUNK[key]) if key in SHRUNK else value for key, value in config.items()}
    return [word for key, value in small.items() for word in render.flag(key, value)]


def config(recipe: Recipe) -> dict[str, Any]:
    """The part of the recipe that a CPU can serve."""
    return {key: value for key, value in recipe.config.items() if key in here(recipe)}


def together() -> dict[str, Any]:
    """Every flag once, as the first recipe that has it sets it."""
    return dict(item for recipe in reversed(RECIPES) for item in config(recipe).items())


CONFIGS = {recipe.id: config(recipe) for recipe in RECIPES} if SOAK else {"together": together()}


def test_every_flag_of_every_recipe_is_tried() -> None:
    assert together().keys() == frozenset().union(*map(here, load.shipped()))
    assert "tool-server" in together()


@pytest.mark.parametrize("name", CONFIGS)
def test_flags_start_and_answer(name: str, model_dir: Path, tmp_path: Path) -> None:
    flags, environment = shrunk(CONFIGS[name]), {"XDG_STATE_HOME": str(tmp_path)}
    with serve(model_dir, tmp_path / "log", flags, environment, popen=warm_vllm.popen) as server:
        client = openai.OpenAI(base_url=server.api, api_key="none", timeout=120, max_retries=0)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.chat.completions.create(model=NAME, messages=question, temperature=0)
        assert answer.choices[0].message.content == "The capital of France is Paris."
        if "tool-server" in CONFIGS[name]:
            assert modal_client(server).asked(server.url, "Compute 17 * 23 with Python.") == "17 * 23 = 391."
        assert said_by_the_guide(server) == "The capital of France is Paris.\n"
        assert httpx.get(f"{server.url}/health").status_code == 200


def said_by_the_guide(server: Server) -> str:
    """Output of docs/guide.md's program with this server; a test compares it with the Chinese guide's."""
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(), re.DOTALL)
    for theirs, ours in (("http://localhost:8000/v1", server.api), ("openai/gpt-oss-20b", NAME)):
        assert program.count(theirs) == 1
        program = program.replace(theirs, ours)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modal_client(server: Server) -> ModuleType:
    """The client of the Modal app, asking this server: it reads today's events and uses a tool."""
    spec = importlib.util.spec_from_file_location("modal_app", ROOT / "recipes" / "deploy" / "modal_app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.MODEL = NAME
    return module
