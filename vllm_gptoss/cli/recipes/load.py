"""Reads files of recipes. An error names the file, the line and the field, and one pass names them all."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from vllm_gptoss.cli.recipes.schema import Family, Recipe, expand
from vllm_gptoss.engine.choose import families
from vllm_gptoss.tools import yaml_file
from vllm_gptoss.tools.yaml_file import YamlFileError, explained, line_of

INSTALLED = Path(__file__).parent / "data"
FOLDER = INSTALLED if INSTALLED.is_dir() else Path(__file__).parents[3] / "recipes"
"""The recipes that ship: a folder of the package in a wheel, the top folder `recipes` in a checkout."""

MOST_BYTES = 256 * 1024
"""Of one file. The largest that ships has 10 kB."""


class RecipeError(ValueError):
    """A file of recipes or configuration that cannot be used; the message has a line for each error."""


@functools.cache
def shipped() -> tuple[Recipe, ...]:
    """Every recipe that comes with the package, file by file in the order of `choose.FAMILIES`."""
    order = [family.name for family in families.FAMILIES]
    read = [load(path) for path in sorted(FOLDER.glob("*.yaml"))]
    return tuple(recipe for group in sorted(read, key=lambda group: order.index(group[0].family)) for recipe in group)


def load(path: Path) -> list[Recipe]:
    """The recipes of one file.

    Raises:
        RecipeError: not found, too large, no YAML, or against the schema.
    """
    data, root = read(path)
    try:
        family = Family.model_validate(data)
    except ValidationError as error:
        raise RecipeError("\n".join(explained(path, root, error))) from None
    places = {index: f"{path.name}:{line_of(root, ('recipes', index))}" for index in range(len(family.recipes))}
    if family.family not in [each.name for each in families.FAMILIES]:
        names = ", ".join(each.name for each in families.FAMILIES)
        raise RecipeError(f"{path}:{line_of(root, ('family',))}: family: there is no {family.family!r}, only {names}")
    found = expand(family, places)
    seen: dict[str, str] = {}
    for recipe in found:
        if (other := seen.setdefault(recipe.id, recipe.place)) != recipe.place:
            raise RecipeError(f"{path}: {recipe.id} is at {other} and at {recipe.place}: give one a `variant`")
    return found


def read(path: Path) -> tuple[Any, yaml.Node]:
    """A file of recipes, or a configuration file: its data, and its nodes, which know their lines.

    Raises:
        RecipeError: what `yaml_file.read` refuses.
    """
    try:
        return yaml_file.read(path, MOST_BYTES)
    except YamlFileError as error:
        raise RecipeError(str(error)) from None
