"""Every method of ours that overrides one of vLLM's still takes what vLLM passes, in every supported release.

Read from the source on both sides: a new subclass is covered the moment it is written.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.source import ROOT, Release, find, parameters, releases

RELEASES = releases()


def overrides() -> Iterator[tuple[Path, str, ast.FunctionDef, str, str]]:
    """(file, class, method, module of the base, base) for every class of ours with a base imported from vLLM."""
    for path in sorted((ROOT / "vllm_gptoss").rglob("*.py")):
        tree = ast.parse(path.read_text())
        origin = {
            alias.asname or alias.name: (str(node.module), alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
            for alias in node.names
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in origin:
                    for method in node.body:
                        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                            yield path, node.name, method, *origin[base.id]  # type: ignore[misc]


OVERRIDES = list(overrides())


def takes(ours: ast.FunctionDef, theirs: ast.stmt) -> list[str]:
    """Upstream's parameters that ours would not accept."""
    if ours.args.vararg is not None and ours.args.kwarg is not None:
        return []
    mine = parameters(ours)
    return [name for name in parameters(theirs) if name not in mine and ours.args.kwarg is None]


def narrow(release: Release) -> list[tuple[str, str]]:
    """(file of ours, problem) of each override that does not accept a parameter of `release`'s method."""
    problems = []
    for path, name, method, module, base in OVERRIDES:
        upstream = find(release, module, f"{base}.{method.name}")
        if isinstance(upstream, ast.FunctionDef | ast.AsyncFunctionDef) and (lacking := takes(method, upstream)):
            where = f"{path.relative_to(ROOT)}:{method.lineno} {name}.{method.name}"
            problems.append((str(path), f"override: {where} does not take {', '.join(lacking)} of {module}.{base}"))
    return problems


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_overrides_take_what_vllm_passes(release: Release) -> None:
    assert [problem for _, problem in narrow(release)] == []


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_the_overridden_methods_are_still_there(release: Release) -> None:
    """An override of a method that vLLM no longer has is never called: the plugin would silently do nothing."""
    known = {"__init__", "__call__", "forward"}
    lost = []
    for path, name, method, module, base in OVERRIDES:
        if method.name.startswith("_") and method.name not in known and not method.name.startswith("__"):
            installed = [find(r, module, f"{base}.{method.name}") for r in RELEASES]
            if any(installed) and find(release, module, f"{base}.{method.name}") is None:
                lost.append(f"{path.relative_to(ROOT)}: {name}.{method.name} overrides nothing in {module}.{base}")
    assert not lost, f"vLLM {release.version} lost a seam:\n" + "\n".join(lost)


def test_there_is_something_to_check() -> None:
    names = {f"{name}.{method.name}" for _, name, method, _, _ in OVERRIDES}
    assert {
        "GptOssForCausalLM.forward",
        "GptOssForCausalLM.load_weights",
        "GptOssQuantConfig._make_moe_method",
    } <= names


def test_a_new_parameter_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("class A:\n    def go(self, x, new): ...\n")
    upstream = find(Release("made up", tmp_path), "vllm", "A.go")
    assert upstream is not None
    narrow = ast.parse("def go(self, x): ...").body[0]
    wide = ast.parse("def go(self, *args, **kwargs): ...").body[0]
    assert isinstance(narrow, ast.FunctionDef)
    assert isinstance(wide, ast.FunctionDef)
    assert takes(narrow, upstream) == ["new"]
    assert takes(wide, upstream) == []
