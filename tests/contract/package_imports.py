"""Imports of vLLM in the package, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.contract.source import ROOT, Release, has_name

PACKAGE = ROOT / "vllm_gptoss"


def imports_of_vllm(path: Path) -> Iterator[tuple[str, str | None, int]]:
    """(module, name or None, line) of every import of vLLM outside a `try`/`except ImportError`."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.Try) and any("ImportError" in ast.dump(handler) for handler in outer.handlers)
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm" and not node.level:
            yield from ((str(node.module), alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, None, node.lineno) for a in node.names if a.name.split(".")[0] == "vllm")


def alternatives(path: Path) -> Iterator[list[tuple[str, str]]]:
    """For each `try`/`except ImportError`, the imports of which one must succeed."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Try) and any("ImportError" in ast.dump(handler) for handler in node.handlers):
            found = [
                (str(inner.module), alias.name)
                for inner in ast.walk(node)
                if isinstance(inner, ast.ImportFrom) and (inner.module or "").split(".")[0] == "vllm"
                for alias in inner.names
            ]
            if found:
                yield found


SOURCES = sorted(PACKAGE.rglob("*.py"))


def missing(release: Release) -> list[tuple[str, str]]:
    """(plugin file, problem) of each import that fails with `release`."""
    found = []
    for path in SOURCES:
        for module, name, line in imports_of_vllm(path):
            if not (release.module(module) is not None if name is None else has_name(release, module, name)):
                why = "the module is gone" if release.module(module) is None else "the module has lost that name"
                what = f"{module}{'.' + name if name else ''}"
                found.append((str(path), f"import: {path.relative_to(ROOT)}:{line} imports {what}: {why}"))
    return found
