"""`vllm serve --config FILE` with a recipe. The file is in the cache folder; the user's flags replace its keys."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_gptoss.cli.recipes import render
from vllm_gptoss.cli.recipes.load import RecipeError
from vllm_gptoss.cli.recipes.schema import Recipe
from vllm_gptoss.engine.choose import devices
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.kernels.nvrtc import cache_directory


def words(recipe: Recipe, extra: Sequence[str]) -> list[str]:
    """The command, a word each; `write` makes its file.

    Raises:
        RecipeError: `extra` names another file.
    """
    if any(word.partition("=")[0] == "--config" for word in extra):
        raise RecipeError(
            f"the recipe is the one --config that vLLM takes; put your keys into a copy of it:"
            f" vllm-gptoss recipe show {recipe.id} --config"
        )
    return ["vllm", "serve", "--config", str(path(recipe)), *extra]


def path(recipe: Recipe) -> Path:
    """`recipes/ID.yaml` in the cache folder."""
    return Path(cache_directory().absolute(), "recipes", f"{recipe.id}.yaml")


def write(recipe: Recipe) -> None:
    """Replaces the file as a whole: another server may be reading it.

    Raises:
        RecipeError: the cache folder cannot be written to.
    """
    target = path(recipe)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, suffix=".part", delete=False) as file:
            file.write(render.config(recipe))
        os.replace(file.name, target)
    except OSError as error:
        raise RecipeError(f"{target}: {error.strerror}; set GPTOSS_CACHE to a folder that can be written to") from None


def elsewhere(recipe: Recipe, device: Device) -> str:
    """Why a recipe is not for this machine; empty where it is."""
    row = devices.of(device)
    if recipe.device.name == (device.name if row is None else row.name) and recipe.device.count <= device.count:
        return ""
    return (
        f"{recipe.id} is for {devices.label(recipe.device)}, this machine has {device}:"
        " `vllm-gptoss recipe list --device auto` lists its recipes"
    )


def overridden(recipe: Recipe, environ: Mapping[str, str]) -> list[str]:
    """A line for each variable that has another value than in the recipe, which replaces it."""
    differ = {name: value for name, value in recipe.env.items() if environ.get(name, value) != value}
    return [f"{name}={value}, as the recipe has it, instead of {environ[name]}" for name, value in differ.items()]
