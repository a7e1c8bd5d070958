"""Imports of vLLM in the package, read from its source."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.contract.source import ROOT, Release, has_name, tree

SOURCES = [
    path
    for path in sorted((ROOT / "vllm_gptoss").rglob("*.py"))
    if re.search(r"\b(from|import) vllm\b", path.read_text())
]
"""Files of the package that import vLLM."""


@functools.cache
def imports_of_vllm(path: Path) -> list[tuple[str, str | None, int]]:
    """(module, name or None, line) of every import of vLLM outside a `try`/`except ImportError`."""
    guarded = {
        id(node)
        for outer in ast.walk(tree(path))
        if isinstance(outer, ast.Try) and any("ImportError" in ast.dump(handler) for handler in outer.handlers)
        for node in ast.walk(outer)
    }
    found: list[tuple[str, str | None, int]] = []
    for node in ast.walk(tree(path)):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm" and not node.level:
            found += [(str(node.module), alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(a.name, None, node.lineno) for a in node.names if a.name.split(".")[0] == "vllm"]
    return found


def alternatives(path: Path) -> Iterator[list[tuple[str, str]]]:
    """For each `try`/`except ImportError`, the imports of which one must succeed."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Try) and any("ImportError" in ast.dump(handler) for handler in node.handlers):
            found = [
                (str(inner.module), alias.name)
                for inner in ast.walk(node)
                if isinstance(inner, ast.ImportFrom) and (inner.module or "").split(".")[0] == "vllm"
                for alias in inner.names
            ]
            if found:
                yield found


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
