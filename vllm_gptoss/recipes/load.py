"""Reads files of recipes. An error names the file, the line and the field, and one pass names them all."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from vllm_gptoss.choose import families
from vllm_gptoss.recipes.schema import Family, Recipe, expand

INSTALLED = Path(__file__).parent / "data"
FOLDER = INSTALLED if INSTALLED.is_dir() else Path(__file__).parents[2] / "recipes"
"""The recipes that ship: a folder of the package in a wheel, the top folder `recipes` in a checkout."""

MOST_BYTES = 256 * 1024
"""Of one file. The largest that ships has 10 kB."""


class RecipeError(ValueError):
    """A file of recipes, or a configuration file, that cannot be used; the message has a line for each error."""


def shipped() -> list[Recipe]:
    """Every recipe that comes with the package, file by file in the order of `choose.FAMILIES`."""
    return list(_shipped())


@functools.cache
def _shipped() -> tuple[Recipe, ...]:
    order = [family.name for family in families.FAMILIES]
    read = [load(path) for path in sorted(FOLDER.glob("*.yaml"))]
    return tuple(recipe for group in sorted(read, key=lambda group: order.index(group[0].family)) for recipe in group)


def load(path: Path) -> list[Recipe]:
    """The recipes of one file.

    Raises:
        RecipeError: not there, too large, no YAML, or not what the schema says.
    """
    data, root = read(path)
    try:
        family = Family.model_validate(data)
    except ValidationError as error:
        raise RecipeError("\n".join(_explained(path, root, error))) from None
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
    """A YAML file's data, and its nodes, which know their lines.

    Raises:
        RecipeError: not there, too large, or no plain YAML: aliases and keys that are there twice are refused.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}") from None
    if len(text) > MOST_BYTES:
        raise RecipeError(f"{path}: larger than {MOST_BYTES // 1024} kB, which no file of recipes is")
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1 if event.start_mark else 1
                raise RecipeError(f"{path}:{line}: aliases (*{event.anchor}) are not allowed")
        root = yaml.compose(text, yaml.SafeLoader)
        if root is None:
            raise RecipeError(f"{path}: the file is empty")
        for line, wrong in _keys(root):
            raise RecipeError(f"{path}:{line}: {wrong}")
        return yaml.safe_load(text), root
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise RecipeError(f"{path}:{1 if mark is None else mark.line + 1}: no YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(f"{path}: no YAML: {error}") from None


def files(path: Path) -> list[Path]:
    """The file, or the YAML files of the folder."""
    return sorted(path.glob("*.yaml")) if path.is_dir() else [path]


def _explained(path: Path, root: yaml.Node, error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        if problem["type"] == "too_short" and problem["input"]:
            continue  # of a list that has entries, each with an error of its own
        where = problem["loc"]
        field = ".".join(str(part) for part in where) or "the file"
        said = problem["msg"].removeprefix("Value error, ")
        got = "" if problem["type"] in ("missing", "value_error") else f", got {str(problem['input'])[:80]!r}"
        yield f"{path}:{line_of(root, where)}: {field}: {said}{got}"


def line_of(root: yaml.Node, where: Sequence[str | int]) -> int:
    """The line of a field, or of the nearest above it that is there."""
    node, line = root, root.start_mark.line
    for part in where:
        found = None
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == part), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            found = (node.value[part], node.value[part])
        if found is None:
            break
        line, node = found[0].start_mark.line, found[1]
    return line + 1


def _keys(node: yaml.Node) -> Iterator[tuple[int, str]]:
    """What is wrong with keys, and the line."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                yield line, "a key is a list or a mapping, not a word"
            elif key.value in seen:
                yield line, f"{key.value}: the key is there twice"
            else:
                seen.add(key.value)
            yield from _keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _keys(each)
