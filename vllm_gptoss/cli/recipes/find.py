"""Which recipe: by its id, or for a machine."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_gptoss.cli.recipes.load import RecipeError
from vllm_gptoss.cli.recipes.schema import Recipe
from vllm_gptoss.engine.choose import devices, families
from vllm_gptoss.engine.choose.device import Device


@dataclass(frozen=True, slots=True)
class Found:
    """Recipes for a machine, and why they are not exactly its own; empty where they are."""

    recipes: tuple[Recipe, ...]
    why: str = ""


def by_id(recipes: Sequence[Recipe], name: str) -> Recipe:
    """The recipe called `name`.

    Raises:
        RecipeError: there is none; the message has near ones.
    """
    known = {recipe.id: recipe for recipe in recipes}
    if name.lower() in known:
        return known[name.lower()]
    begins = [each for each in known if name and each.startswith(name.lower())]
    near = begins or difflib.get_close_matches(name.lower(), known, n=5, cutoff=0.4)
    hint = f"near: {', '.join(near)}" if near else "`vllm-gptoss recipe list` has them all"
    raise RecipeError(f"no recipe is called {name!r}; {hint}")


def for_device(recipes: Sequence[Recipe], device: Device) -> Found:
    """Recipes of this device and as many; else of fewer of them; else of its family, which is said."""
    row = devices.of(device)
    name = device.name if row is None else row.name
    same = [recipe for recipe in recipes if recipe.device.name == name]
    exact = tuple(recipe for recipe in same if recipe.device.count == device.count)
    if exact:
        return Found(exact)
    fewer = tuple(recipe for recipe in same if recipe.device.count < device.count)
    if fewer:
        return Found(fewer, f"no recipe is for {devices.label(replace(device, name=name))}: these use fewer of them")
    family = families.of(device)
    kin = tuple(recipe for recipe in recipes if recipe.family == family.name and recipe.device.count <= device.count)
    if why := families.unserved(device):
        return Found((), f"no recipe is for {device}: {why}")
    if not kin:
        return Found((), f"no recipe is for {device}, and none for its family; vLLM's own defaults serve it")
    near = min({recipe.device.name for recipe in kin}, key=lambda each: abs(_memory(kin, each) - device.memory_gib))
    chosen = tuple(recipe for recipe in kin if recipe.device.name == near)
    why = f"no recipe is for {device}: these are for {near}, of the same family ({family.name})"
    return Found(chosen, f"{why}; `recipe plan` says what fits")


def _memory(recipes: Sequence[Recipe], name: str) -> float:
    return next(recipe.device.memory_gib for recipe in recipes if recipe.device.name == name)
