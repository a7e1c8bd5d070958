"""Methods of the package that override methods of vLLM, read from the source of both."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from tests.contract.package_imports import SOURCES
from tests.contract.source import ROOT, Release, find, parameters, tree


@functools.cache
def overrides() -> list[tuple[Path, str, ast.FunctionDef, str, str]]:
    """(file, class, method, module of the base, base) for every plugin class with a base imported from vLLM."""
    found = []
    for path in SOURCES:
        origin = {
            alias.asname or alias.name: (str(node.module), alias.name)
            for node in ast.walk(tree(path))
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
            for alias in node.names
        }
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in origin:
                    for method in node.body:
                        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                            found.append((path, node.name, method, *origin[base.id]))
    return found  # type: ignore[return-value]


def takes(ours: ast.FunctionDef, theirs: ast.stmt) -> list[str]:
    """Parameters of the vLLM method that the override does not accept."""
    if ours.args.vararg is not None and ours.args.kwarg is not None:
        return []
    mine = parameters(ours)
    return [name for name in parameters(theirs) if name not in mine and ours.args.kwarg is None]


def narrow(release: Release) -> list[tuple[str, str]]:
    """(plugin file, problem) of each override that does not accept a parameter of `release`'s method."""
    problems = []
    for path, name, method, module, base in overrides():
        upstream = find(release, module, f"{base}.{method.name}")
        if isinstance(upstream, ast.FunctionDef | ast.AsyncFunctionDef) and (lacking := takes(method, upstream)):
            where = f"{path.relative_to(ROOT)}:{method.lineno} {name}.{method.name}"
            problems.append((str(path), f"override: {where} does not take {', '.join(lacking)} of {module}.{base}"))
    return problems
