"""Recipes start: their flags, shrunk to a CPU and the small model, with real `vllm serve`; one question is answered."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import httpx
import openai
import pytest

from demo.server import NAME, Server, serve
from tests.support.scale import count
from vllm_gptoss.recipes import load, render
from vllm_gptoss.recipes.schema import Recipe

pytestmark = [pytest.mark.vllm, pytest.mark.serve, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "additional-config",
    "attention-backend",
    "compilation-config",
    "data-parallel-size",
    "enable-expert-parallel",
    "gpu-memory-utilization",
    "speculative-config",
    "tensor-parallel-size",
}
"""Flags of hardware that is not here, or of a head that would be fetched."""


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
SAMPLE = 4
"""Of them in `make test`; `make soak` starts all, 35 s each on 2 cores."""
SHRUNK = ("max-model-len", "max-num-batched-tokens", "max-num-seqs", "max-cudagraph-capture-size")


def shrunk(recipe: Recipe) -> list[str]:
    small = dict(zip(SHRUNK, (16_384, 2048, 32, 32), strict=True))
    config = {key: min(value, small[key]) if key in small else value for key, value in recipe.config.items()}
    flags = {key: value for key, value in config.items() if key in here(recipe)}
    return [word for key, value in flags.items() for word in render.flag(key, value)]


def test_the_first_few_bring_every_flag() -> None:
    assert frozenset().union(*map(here, RECIPES[:SAMPLE])) == frozenset().union(*map(here, load.shipped()))


@pytest.mark.parametrize("recipe", RECIPES[: count(len(RECIPES), SAMPLE)], ids=lambda recipe: recipe.id)
def test_a_recipes_flags_start_and_answer(recipe: Recipe, model_dir: Path, tmp_path: Path) -> None:
    with serve(model_dir, tmp_path / "log", shrunk(recipe), {"XDG_STATE_HOME": str(tmp_path)}) as served:
        client = openai.OpenAI(base_url=served.api, api_key="none", timeout=120, max_retries=0)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.chat.completions.create(model=NAME, messages=question, temperature=0)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "The capital of France is Paris."
        if "tool-server" in here(recipe):
            assert modal_client(served).asked(served.url, "Compute 17 * 23 with Python.") == "17 * 23 = 391."
        assert httpx.get(f"{served.url}/health").status_code == 200


def modal_client(served: Server) -> ModuleType:
    """The client of the Modal app, asking this server: it reads today's events and uses a tool."""
    spec = importlib.util.spec_from_file_location("modal_app", ROOT / "recipes" / "deploy" / "modal_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.MODEL = NAME
    return module
