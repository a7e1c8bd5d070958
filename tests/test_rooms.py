"""The package's rooms have one order: imports go down it, and there is no circle of imports."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "vllm_gptoss"
NAME = PACKAGE.name

PARTS = ("engine", "server", "cli")
"""Folders that are several rooms, each folder and file of them one."""

ORDER = (
    "version",
    "settings",
    "_vllm",
    "startup_line",
    "fallback",
    "engine.spec",
    "engine.kernels",
    "engine.choose",
    "engine.parent_death",
    "engine.checkpoint",
    "engine.experts",
    "engine.attention",
    "engine.model",
    "engine.runner",
    "tools",
    "server.harmony",
    "server.http",
    "server.streaming",
    "server.chat",
    "server.ui",
    "server.responses",
    "server.parts",
    "plugin",
    "cli.recipes",
    "cli.doctor",
    "cli.bench",
    "cli.eval",
    "cli.main",
    "cli.__main__",
)
"""Top to bottom: what is imported by anyone, to what imports anything. A room is a folder or file of the package."""

SHARED = frozenset({"_vllm", "fallback", "settings", "startup_line", "version"})
"""Imports that engine and server may both have."""

MAY_IMPORT: Mapping[str, frozenset[str]] = {"tools": frozenset(), "engine": SHARED, "server": SHARED | {"tools"}}
"""Allowed imports of each package: engine and server import nothing of each other, and nothing imports cli."""


@functools.cache
def modules() -> Mapping[str, Path]:
    """Dotted names without the package's own, and their files; the package itself is ""."""
    paths = {path.relative_to(PACKAGE).with_suffix(""): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(part for part in name.parts if part != "__init__"): path for name, path in paths.items()}


def named(module: str, path: Path) -> Iterator[tuple[str, str]]:
    """(module, name or nothing) of every import of a file, also inside functions, where a circle closes as well."""
    package = [NAME, *module.split(".")] if module else [NAME]
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((base, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def imports(module: str, path: Path, known: Iterable[str]) -> Iterator[str]:
    """Modules of the package that a file imports."""
    for base, name in named(module, path):
        yield from (_own(f"{base}.{name}", known) if name else []) or _own(base, known)


def _own(name: str, known: Iterable[str]) -> list[str]:
    if name != NAME and not name.startswith(NAME + "."):
        return []
    short = name.removeprefix(NAME).removeprefix(".")
    return [short] if short in known else []


@functools.cache
def graph() -> Mapping[str, frozenset[str]]:
    return {name: frozenset(imports(name, path, modules())) - {name} for name, path in modules().items()}


def room(module: str) -> str:
    first, _, rest = module.partition(".")
    return f"{first}.{rest.split('.')[0]}" if first in PARTS and rest else first


def upward(graph: Mapping[str, Iterable[str]]) -> dict[tuple[str, str], list[str]]:
    """Imports by pair of rooms that do not go down the order."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, targets in graph.items():
        for target in targets:
            ours, theirs = room(module), room(target)
            is_placed = {ours, theirs}.isdisjoint({"", *PARTS})
            if is_placed and ours != theirs and ORDER.index(theirs) > ORDER.index(ours):
                found.setdefault((ours, theirs), []).append(f"{module} imports {target}")
    return found


def strangers(graph: Mapping[str, Iterable[str]], package: str) -> list[str]:
    """Imports of `package` that it may not have."""
    may = {"", package, *MAY_IMPORT[package]}
    mine = [name for name in graph if name.split(".")[0] == package]
    return [f"{name} imports {to}" for name in mine for to in sorted(graph[name]) if to.split(".")[0] not in may]


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """One circle of imports, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_has_its_place() -> None:
    rooms = {room(module) for module in modules()} - {"", *PARTS}
    assert rooms == set(ORDER), "a new room needs a place in ORDER"


def test_imports_go_down() -> None:
    found = upward(graph())
    assert not found, "upward imports:\n" + "\n".join(line for lines in found.values() for line in lines)


def test_no_files_import_each_other_around() -> None:
    assert not circle(graph())


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    assert (PACKAGE / package).is_dir()
    assert not strangers(graph(), package)


def test_nothing_imports_the_command_line() -> None:
    found = {name for name, targets in graph().items() if any(room(target).startswith("cli") for target in targets)}
    assert {name for name in found if room(name).startswith("cli.")} == found


def test_the_format_imports_neither_vllm_nor_fastapi() -> None:
    """Nor does any module of the package that it imports."""
    seen: set[str] = set()
    ahead = {name for name in modules() if name.startswith("server.harmony.")}
    assert len(ahead) > 20
    while ahead:
        seen |= ahead
        ahead = {target for name in ahead for target in graph()[name]} - seen
    assert not {name for name in seen if room(name) not in ("server.harmony", "tools", "")} - {"version"}
    wrong = ("vllm", "fastapi", "starlette")
    assert not [(n, base) for n in seen for base, _ in named(n, modules()[n]) if base.split(".")[0] in wrong]


def test_the_package_can_be_read_without_importing_it() -> None:
    assert graph()["plugin"] >= {"_vllm", "version"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from vllm_gptoss.tools import gate", {"tools.gate"}),
        ("from vllm_gptoss.tools.gate import Gate", {"tools.gate"}),
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


def test_upward_arrows_strangers_and_circles_would_be_seen() -> None:
    assert upward({"tools.a": ["plugin"], "plugin": ["tools.a"]}) == {("tools", "plugin"): ["tools.a imports plugin"]}
    assert strangers({"tools.a": ["tools.b", "settings"], "plugin": ["tools.a"]}, "tools") == [
        "tools.a imports settings"
    ]
    assert circle({"a": ["b"], "b": ["c"], "c": ["a"]})
    assert not circle({"a": ["b"], "b": ["c"]})
