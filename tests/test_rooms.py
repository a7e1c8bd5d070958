"""The package's rooms stand in one order: imports go down it, and no two files import each other, near or far."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "vllm_gptoss"
NAME = PACKAGE.name

ORDER = (
    "version",
    "spec",
    "device",
    "kernels",
    "settings",
    "yaml_file",
    "choose",
    "_vllm",
    "announce",
    "aside",
    "describe",
    "error_format",
    "routes",
    "direct",
    "ahead",
    "completions",
    "parent_death",
    "checkpoint",
    "reference",
    "experts",
    "attention",
    "model",
    "runner",
    "callers",
    "flood",
    "tools",
    "bodies",
    "harmony",
    "responses",
    "loop_watch",
    "front",
    "parts",
    "plugin",
    "recipes",
    "doctor",
    "bench",
    "eval",
    "cli",
)
"""Top to bottom: what is imported by anyone, to what imports anything. A room is a folder or file of the package."""


@functools.cache
def modules() -> Mapping[str, Path]:
    """Dotted names without the package's own, and their files; the package itself is ""."""
    paths = {path.relative_to(PACKAGE).with_suffix(""): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(part for part in name.parts if part != "__init__"): path for name, path in paths.items()}


def imports(module: str, path: Path, known: Iterable[str]) -> Iterator[str]:
    """Modules of the package that a file imports, also inside functions: a circle is one whenever it closes."""
    package = [NAME, *module.split(".")] if module else [NAME]
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                yield from _own(f"{base}.{alias.name}", known) or _own(base, known)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _own(alias.name, known)


def _own(name: str, known: Iterable[str]) -> list[str]:
    if name != NAME and not name.startswith(NAME + "."):
        return []
    short = name.removeprefix(NAME).removeprefix(".")
    return [short] if short in known else []


@functools.cache
def graph() -> Mapping[str, frozenset[str]]:
    return {name: frozenset(imports(name, path, modules())) - {name} for name, path in modules().items()}


def room(module: str) -> str:
    return module.split(".")[0]


def upward(graph: Mapping[str, Iterable[str]]) -> dict[tuple[str, str], list[str]]:
    """Imports by pair of rooms that do not go down the order."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, targets in graph.items():
        for target in targets:
            ours, theirs = room(module), room(target)
            if ours and theirs and ours != theirs and ORDER.index(theirs) > ORDER.index(ours):
                found.setdefault((ours, theirs), []).append(f"{module} imports {target}")
    return found


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """One circle of imports, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_has_its_place() -> None:
    rooms = {room(module) for module in modules()} - {""}
    assert rooms <= set(ORDER), "a new room needs a place in ORDER"


def test_imports_go_down() -> None:
    found = upward(graph())
    assert not found, "upward imports:\n" + "\n".join(line for lines in found.values() for line in lines)


def test_no_files_import_each_other_around() -> None:
    assert not circle(graph())


def test_the_package_can_be_read_without_importing_it() -> None:
    assert graph()["cli"] >= {"version"}
    assert "_vllm" in graph()["plugin"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from vllm_gptoss.harmony import parser", {"harmony.parser"}),
        ("from vllm_gptoss.harmony.parser import HarmonyParser", {"harmony.parser"}),
        ("def f():\n    import vllm_gptoss.plugin", {"plugin"}),
        ("from . import page", {"tools.browser.page"}),
        ("from ..protocol import Tool", {"tools.protocol"}),
        ("from vllm.plugins import x", set()),
    ],
)
def test_every_form_of_import_is_seen(tmp_path: Path, text: str, found: set[str]) -> None:
    path = tmp_path / "made_up.py"
    path.write_text(text)
    assert set(imports("tools.browser.made_up", path, modules())) == found


def test_upward_arrows_and_circles_would_be_seen() -> None:
    assert upward({"kernels.a": ["model.b"], "model.b": ["kernels.a"]}) == {
        ("kernels", "model"): ["kernels.a imports model.b"]
    }
    assert circle({"a": ["b"], "b": ["c"], "c": ["a"]})
    assert not circle({"a": ["b"], "b": ["c"]})
