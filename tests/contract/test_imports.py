"""Every name that the package imports from vLLM exists in every supported release.

The list is read from the package's own source, so that a new import is covered the moment it is written.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.source import ROOT, Release, has_name, releases

PACKAGE = ROOT / "vllm_gptoss"
RELEASES = releases()


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


def test_both_supported_releases_are_here() -> None:
    if len(RELEASES) < 2:
        pytest.skip(f"only {[r.version for r in RELEASES]} here: run scripts/vllm_source.py for the other")
    assert {release.version for release in RELEASES} >= {"installed", "0.33.0"}


def missing(release: Release) -> list[tuple[str, str]]:
    """(file of ours, problem) of each import that fails with `release`."""
    found = []
    for path in SOURCES:
        for module, name, line in imports_of_vllm(path):
            if not (release.module(module) is not None if name is None else has_name(release, module, name)):
                why = "the module is gone" if release.module(module) is None else "the module has lost that name"
                what = f"{module}{'.' + name if name else ''}"
                found.append((str(path), f"import: {path.relative_to(ROOT)}:{line} imports {what}: {why}"))
    return found


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_every_imported_name_exists(release: Release) -> None:
    assert [problem for _, problem in missing(release)] == []


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_one_of_each_guarded_import_exists(release: Release) -> None:
    lost = [
        f"{path.relative_to(ROOT)}: none of {choices} exists"
        for path in SOURCES
        for choices in alternatives(path)
        if not any(has_name(release, module, name) for module, name in choices)
    ]
    assert lost == []


def test_a_lost_name_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("here = 1\n")
    release = Release("made up", tmp_path)
    assert has_name(release, "vllm", "here")
    assert not has_name(release, "vllm", "gone")
    assert not has_name(release, "vllm.gone", "here")
