"""Which recipe: by its id, or for a machine."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_gptoss.cli.recipes import plan
from vllm_gptoss.cli.recipes.load import RecipeError
from vllm_gptoss.cli.recipes.schema import Recipe
from vllm_gptoss.engine.choose import devices, families
from vllm_gptoss.engine.choose.device import Device

SEARCH = "; `recipe plan --model 20b --context 8k`, with the same --device, searches settings that fit"


@dataclass(frozen=True, slots=True)
class Found:
    """Recipes for a machine. why: the reason if they are another machine's, else empty."""

    recipes: tuple[Recipe, ...]
    why: str = ""


def by_id(recipes: Sequence[Recipe], name: str) -> Recipe:
    """The recipe called `name`.

    Raises:
        RecipeError: there is none; the message has similar ids.
    """
    known = {recipe.id: recipe for recipe in recipes}
    if name.lower() in known:
        return known[name.lower()]
    begins = [each for each in known if name and each.startswith(name.lower())]
    near = begins or difflib.get_close_matches(name.lower(), known, n=5, cutoff=0.4)
    hint = f"near: {', '.join(near)}" if near else "`vllm-gptoss recipe list` has them all"
    raise RecipeError(f"no recipe is called {name!r}; {hint}")


def fitting(recipes: Sequence[Recipe], device: Device) -> Found:
    """Recipes of the device's family, for as many GPUs or fewer, that fit its memory."""
    family = families.of(device).name
    kin = [recipe for recipe in recipes if recipe.family == family and recipe.device.count <= device.count]
    found = tuple(recipe for recipe in kin if plan.fits(recipe.spec, device, recipe.config, recipe.env))
    return Found(found, "" if found else f"no recipe fits {device}{SEARCH}")


def for_device(recipes: Sequence[Recipe], device: Device) -> Found:
    """Recipes of this device and as many; else of fewer of them; else of its family, with the reason. All fit."""
    near = _nearest(recipes, device)
    found = tuple(recipe for recipe in near.recipes if plan.fits(recipe.spec, device, recipe.config, recipe.env))
    lost = len(near.recipes) - len(found)
    if not lost:
        return near
    others = sorted({devices.label(recipe.device) for recipe in near.recipes if recipe not in found})
    why = f"{lost} of {len(near.recipes)} recipes for {', '.join(others)} need more memory than {device}"
    search = f"; {devices.LLAMA} with less memory" if device.vendor == "cpu" else SEARCH
    start = near.why if found and near.why else "" if found else f"no recipe is for {device}"
    return Found(found, "; ".join(filter(None, (start, why))) + search)


def elsewhere(recipe: Recipe, device: Device) -> str:
    """Why a recipe is not for this machine; empty where it is."""
    if recipe.device.name == _name(device) and recipe.device.count <= device.count:
        return ""
    return (
        f"{recipe.id} is for {devices.label(recipe.device)}, this machine has {device}:"
        " `vllm-gptoss recipe list --device auto` lists its recipes"
    )


def _name(device: Device) -> str:
    return row.name if (row := devices.of(device)) else device.name


def _nearest(recipes: Sequence[Recipe], device: Device) -> Found:
    name = _name(device)
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
    near = min((recipe.device for recipe in kin), key=lambda each: abs(each.memory_gib - device.memory_gib)).name
    chosen = tuple(recipe for recipe in kin if recipe.device.name == near)
    why = f"no recipe is for {device}: these are for {near}, of the same family ({family.name})"
    return Found(chosen, f"{why}; `recipe plan` calculates what fits")
