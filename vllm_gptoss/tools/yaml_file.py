"""YAML that an operator wrote: read within bounds, and every complaint with its line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError


class YamlFileError(ValueError):
    """A file that cannot be used; the message has `file:line: …` for each reason."""


def files(path: Path) -> list[Path]:
    return sorted([*path.glob("*.yaml"), *path.glob("*.yml")]) if path.is_dir() else [path]


def read(path: Path, most_bytes: int) -> tuple[Any, yaml.Node]:
    """A file's data, and its nodes, which know their lines. Raises YamlFileError: not there, too large, or no plain
    YAML: aliases and keys that are there twice are refused."""
    try:
        with path.open("rb") as file:
            text = file.read(most_bytes + 1)
    except OSError as error:
        raise YamlFileError(f"{path}: {error.strerror}") from None
    if len(text) > most_bytes:
        raise YamlFileError(f"{path}: larger than {most_bytes // 1024} kB")
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1 if event.start_mark else 1
                raise YamlFileError(f"{path}:{line}: aliases (*{event.anchor}) are not allowed")
        root = yaml.compose(text, yaml.SafeLoader)
        if root is None:
            raise YamlFileError(f"{path}: the file is empty")
        for line, wrong in _keys(root):
            raise YamlFileError(f"{path}:{line}: {wrong}")
        return yaml.safe_load(text), root
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlFileError(f"{path}:{1 if mark is None else mark.line + 1}: no YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, YamlFileError):
            raise
        raise YamlFileError(f"{path}: no YAML: {error}") from None


def explained(path: Path, root: yaml.Node, error: ValidationError) -> Iterator[str]:
    """`file:line: field: what is wrong` for each problem that pydantic found."""
    for problem in error.errors():
        if problem["type"] == "too_short" and problem["input"]:
            continue  # of a list that has entries, each with its own error
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
            found = next(((key, value) for key, value in node.value if key.value == str(part)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            found = (node.value[part], node.value[part])
        if found is None:
            break
        line, node = found[0].start_mark.line, found[1]
    return line + 1


def _keys(node: yaml.Node) -> Iterator[tuple[int, str]]:
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
