"""A machine gets its recipes, or the nearest with the reason, and only those that fit."""

from __future__ import annotations

import dataclasses

import pytest

from vllm_gptoss.cli.recipes import find, load, plan
from vllm_gptoss.cli.recipes.load import RecipeError
from vllm_gptoss.engine.choose import devices, families
from vllm_gptoss.engine.choose.device import Device

RECIPES = load.shipped()


def test_a_known_machine_gets_its_own() -> None:
    found = find.for_device(RECIPES, Device("nvidia", "NVIDIA H200", "sm90", 139.8, 2))
    assert found.why == ""
    assert {devices.label(recipe.device) for recipe in found.recipes} == {"2xH200"}


def test_an_odd_count_gets_fewer_and_says_so() -> None:
    found = find.for_device(RECIPES, devices.named("3xH200"))
    assert {recipe.device.count for recipe in found.recipes} == {1, 2}
    assert "no recipe is for 3xH200" in found.why


@pytest.mark.parametrize(
    ("device", "near"),
    [
        (Device("nvidia", "NVIDIA GeForce RTX 3090", "sm86", 23.7), "RTX-4090"),
        (Device("nvidia", "NVIDIA A100-SXM4-40GB", "sm80", 39.4), "L40S"),
        (Device("nvidia", "NVIDIA H20", "sm90", 95.1), "H100"),
    ],
)
def test_an_unknown_card_gets_the_nearest_of_its_family(device: Device, near: str) -> None:
    found = find.for_device(RECIPES, device)
    assert {recipe.device.name for recipe in found.recipes} == {near}
    assert f"these are for {near}, of the same family" in found.why


@pytest.mark.parametrize("model", devices.NEIGHBOURS, ids=lambda model: model.name)
def test_a_card_without_recipes_can_be_named_and_is_told_whose_it_gets(model: devices.Model) -> None:
    found = find.for_device(RECIPES, devices.named(model.name.lower()))
    assert f"no recipe is for {model.name}" in found.why
    assert all(plan.fits(each.spec, model.device(), each.config, each.env) for each in found.recipes)
    assert {recipe.family for recipe in found.recipes} <= {families.of(model.device()).name}


@pytest.mark.parametrize(
    ("device", "sizes"),
    [
        (devices.named("RTX-5080"), set()),
        (devices.named("RTX-4090-48G"), {"20b"}),
        (dataclasses.replace(devices.named("CPU"), memory_gib=24.0), set()),
        (dataclasses.replace(devices.named("CPU"), memory_gib=64.0), {"20b"}),
        (devices.named("CPU"), {"20b"}),
    ],
    ids=str,
)
def test_no_recipe_is_offered_that_needs_more_memory(device: Device, sizes: set[str]) -> None:
    found = find.for_device(RECIPES, device)
    assert {recipe.model for recipe in found.recipes} == sizes
    assert bool(found.recipes) == ("need more memory" not in found.why)
    assert bool(found.recipes) == ("plan --model 20b --context 8k" not in found.why and "llama.cpp" not in found.why)


def test_all_recipes_that_fit_a_card_are_found() -> None:
    found = find.fitting(RECIPES, devices.named("RTX-3090")).recipes
    assert {recipe.model for recipe in found} == {"20b"}
    assert {recipe.device.name for recipe in found} >= {"RTX-4090", "A100"}
    assert "no recipe fits" in find.fitting(RECIPES, devices.named("RTX-3060")).why


def test_a_family_that_nobody_knows_gets_none_and_says_what_happens() -> None:
    found = find.for_device(RECIPES, Device("nvidia", "NVIDIA of tomorrow", "sm140", 400.0))
    assert not found.recipes
    assert "vLLM's own defaults" in found.why
    old = find.for_device(RECIPES, Device("nvidia", "Tesla T4", "sm75", 14.7))
    assert not old.recipes
    assert "from compute capability 8.0" in old.why


def test_ids_are_found_in_any_case_and_near_ones_named() -> None:
    assert find.by_id(RECIPES, "20B-H100-Latency").id == "20b-h100-latency"
    with pytest.raises(RecipeError, match=r"'20b-h100-latncy'; near: 20b-h100-latency"):
        find.by_id(RECIPES, "20b-h100-latncy")
    with pytest.raises(RecipeError, match="recipe list"):
        find.by_id(RECIPES, "?")
