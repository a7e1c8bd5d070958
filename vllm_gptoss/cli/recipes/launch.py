"""`vllm serve --config FILE` with a recipe: the file is in the cache folder, flags of the user's own win over it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_gptoss.cli.recipes import render
from vllm_gptoss.cli.recipes.load import RecipeError
from vllm_gptoss.cli.recipes.schema import Recipe
from vllm_gptoss.engine.kernels.nvrtc import cache_directory


def words(recipe: Recipe, extra: Sequence[str]) -> list[str]:
    """The command, a word each; its file is written.

    Raises:
        RecipeError: the file cannot be written, or `extra` names another one.
    """
    if any(word.partition("=")[0] == "--config" for word in extra):
        raise RecipeError(
            f"the recipe is the one --config that vLLM takes; put your keys into a copy of it:"
            f" vllm-gptoss recipe show {recipe.id} --config"
        )
    return ["vllm", "serve", "--config", str(write(recipe)), *extra]


def write(recipe: Recipe) -> Path:
    """`recipes/ID.yaml` in the cache folder, replaced whole: another server may be reading it.

    Raises:
        RecipeError: that folder cannot be written to.
    """
    folder = Path(cache_directory().absolute(), "recipes")
    path = folder / f"{recipe.id}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            file.write(render.config(recipe))
        os.replace(file.name, path)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}; set GPTOSS_CACHE to a folder that can be written to") from None
    return path


def overridden(recipe: Recipe, environ: Mapping[str, str]) -> list[str]:
    """A line for each variable that is set to something else than the recipe says, which wins."""
    differ = {name: value for name, value in recipe.env.items() if environ.get(name, value) != value}
    return [f"{name}={value}, as the recipe has it, instead of {environ[name]}" for name, value in differ.items()]
