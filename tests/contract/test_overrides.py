"""Every plugin method that overrides a method of vLLM accepts vLLM's arguments, in every supported release.

The tests parse both sources, so they cover new subclasses without changes.
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.contract.overrides import narrow, overrides, takes
from tests.contract.source import ROOT, Release, find, releases

RELEASES = releases()


def test_overrides_take_what_vllm_passes(release: Release) -> None:
    assert [problem for _, problem in narrow(release)] == []


def test_the_overridden_methods_are_still_there(release: Release) -> None:
    """An override of a method that vLLM no longer has is never called: the plugin would silently do nothing."""
    known = {"__init__", "__call__", "forward"}
    lost = []
    for path, name, method, module, base in overrides():
        if method.name.startswith("_") and method.name not in known and not method.name.startswith("__"):
            installed = [find(r, module, f"{base}.{method.name}") for r in RELEASES]
            if any(installed) and find(release, module, f"{base}.{method.name}") is None:
                lost.append(f"{path.relative_to(ROOT)}: {name}.{method.name} overrides nothing in {module}.{base}")
    assert not lost, f"vLLM {release.version} lost a seam:\n" + "\n".join(lost)


def test_there_is_something_to_check() -> None:
    names = {f"{name}.{method.name}" for _, name, method, _, _ in overrides()}
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
