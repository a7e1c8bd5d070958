"""The `vllm serve` command of a recipe, followed by the user's flags: of a repeated flag, vLLM takes the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_gptoss.cli.recipes import render
from vllm_gptoss.cli.recipes.load import RecipeError
from vllm_gptoss.cli.recipes.schema import Recipe
from vllm_gptoss.engine.choose import devices
from vllm_gptoss.engine.choose.device import Device


def words(recipe: Recipe, extra: Sequence[str]) -> list[str]:
    """The command, a word each.

    Raises:
        RecipeError: `extra` has a `--config`, whose keys would lose.
    """
    if any(word.partition("=")[0] == "--config" for word in extra):
        raise RecipeError(
            f"the recipe's flags win over a --config; put your keys into a copy of it:"
            f" vllm-gptoss recipe show {recipe.id} --config"
        )
    return [*render.words(recipe), *extra]


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
