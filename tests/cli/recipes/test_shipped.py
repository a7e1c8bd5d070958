"""The shipped recipes: every GPU of the guides has one, and every claim has evidence."""

from __future__ import annotations

import re

import pytest

from vllm_gptoss.cli.recipes import load, render
from vllm_gptoss.cli.recipes.schema import Goal, Recipe, Status
from vllm_gptoss.engine.choose import bands, devices, families

RECIPES = load.shipped()
BOTH = ("20b", "120b")
ROWS = {
    **dict.fromkeys(("H100", "H200", "B200", "GB200", "B300", "A100", "MI300X", "MI325X", "MI355X"), BOTH),
    **dict.fromkeys(("RTX-PRO-6000", "DGX-Spark", "CPU-AMX"), BOTH),
    **dict.fromkeys(("L40S", "RTX-4090", "RTX-5090", "R9700", "CPU"), ("20b",)),
    **dict.fromkeys(("2xH100", "4xH100", "8xH100", "2xH200", "4xH200", "8xH200"), ("120b",)),
    **dict.fromkeys(
        ("2xA100", "4xA100", "2xL40S", "4xRTX-4090", "4xRTX-5090", "4xR9700", "2xB200", "4xB200"), ("120b",)
    ),
}
"""Devices, and the models that they serve. One of the small cards holds no 120b."""


def of(model: str, device: str) -> list[Recipe]:
    return [each for each in RECIPES if (each.model, devices.label(each.device)) == (model, device)]


@pytest.mark.parametrize("device", ROWS)
def test_every_row_has_a_recipe(device: str) -> None:
    for model in ROWS[device]:
        assert of(model, device), f"no recipe of the {model} for {device}"


def test_every_family_has_its_file_and_every_goal_a_recipe() -> None:
    assert {recipe.family for recipe in RECIPES} == {family.name for family in families.FAMILIES}
    assert {recipe.goal for recipe in RECIPES} == set(Goal)


def test_who_has_gpus_enough_for_the_120b_is_told_how_to_serve_tools_and_to_evaluate() -> None:
    small = ("4xRTX-4090", "4xRTX-5090", "4xR9700", "2xL40S", "4xL40S", "RTX-PRO-6000", "DGX-Spark")
    several = [f"{count}x{name}" for count in (2, 4, 8) for name in ("H100", "H200")]
    for device in ("H100", "H200", *several, "A100", "2xA100", "4xA100", "B200", "MI300X", "MI355X", *small):
        assert Goal.AGENT in {recipe.goal for recipe in of("120b", device)}, device
    for device in ("H100", "2xH100", "8xH100", "H200", "2xH200", "8xH200", "2xA100", "B200", "MI300X", "MI355X"):
        assert Goal.EVALUATION in {recipe.goal for recipe in of("120b", device)}, device


def test_one_gpu_that_holds_a_model_serves_it_for_every_goal() -> None:
    """Of CPUs, and where one 80 GB A100 has no room for many requests of the 120b, fewer goals make sense."""
    for model in BOTH:
        for row in devices.MODELS:
            here = of(model, row.name)
            if here and row.vendor != "cpu" and (model, row.name) != ("120b", "A100"):
                assert {recipe.goal for recipe in here} == set(Goal), (model, row.name)


def test_every_device_of_the_table_is_served() -> None:
    assert {recipe.device.name for recipe in RECIPES} == {model.name for model in devices.MODELS}


def test_ids_are_one_recipe_each() -> None:
    assert len({recipe.id for recipe in RECIPES}) == len(RECIPES)


def test_the_usage_guides_evaluation_is_whole() -> None:
    (recipe,) = (each for each in of("120b", "8xH100") if each.goal is Goal.EVALUATION)
    assert recipe.config == {
        "model": "openai/gpt-oss-120b",
        "tensor-parallel-size": 8,
        "max-num-batched-tokens": 10240,
        "max-num-seqs": 128,
        "gpu-memory-utilization": 0.85,
        "no-enable-prefix-caching": True,
    }  # and max-model-len 131072, which is the default
    assert "65.3, 72.4, 79.4" in recipe.published[0].says
    assert "51.2, 79.6, 93.0" in recipe.published[0].says


def test_status_is_what_is_proven() -> None:
    by_id = {recipe.id: recipe for recipe in RECIPES}
    assert by_id["20b-h100-latency"].status is Status.MEASURED
    assert by_id["120b-h100-agent"].status is Status.MEASURED
    assert by_id["120b-2xh100-agent"].status is Status.CONFIGURATION  # two H200 were measured, not two H100
    assert by_id["120b-mi300x-latency"].status is Status.PUBLISHED
    assert by_id["20b-mi300x-latency"].status is Status.CONFIGURATION  # the source speaks of the 120b


def test_the_readmes_table_is_these_recipes() -> None:
    """Else: `vllm-gptoss recipe list --markdown` between the two comments."""
    text = (load.FOLDER / "README.md").read_text()
    _, _, rest = text.partition("<!-- recipes -->\n")
    assert rest.partition("<!-- /recipes -->")[0] == render.table(RECIPES)


def test_drafts_are_fused_for_as_many_requests_as_the_notes_say() -> None:
    said = {}
    for recipe in RECIPES:
        note = recipe.entry.note.replace("\n", " ")
        for drafts, requests in re.findall(r"[Ww]ith (\d+) drafts up to (\d+) requests are fused", note):
            assert recipe.config["speculative-config"]["num_speculative_tokens"] == int(drafts)
            said[int(drafts)] = int(requests)
    assert said == {3: bands.MANY_TOKENS // 4, 7: bands.FUSED_TOKENS // 8}


def test_placeholders_are_filled() -> None:
    assert not [recipe.id for recipe in RECIPES if "{" in render.config(recipe)]


def test_every_claim_belongs_to_a_recipe() -> None:
    """A claim of a model or device that its entry lacks would be shown nowhere."""
    for recipe in RECIPES:
        entry = recipe.entry
        assert {claim.model for claim in entry.claims} <= set(entry.models)
        assert {claim.device for claim in entry.claims} <= set(entry.devices)
        named = [name for each in entry.published for name in each.devices]
        assert set(named) <= set(entry.devices)
