"""Every name that the package imports from vLLM exists in every supported release.

The list is read from the package's own source, so that a new import is covered the moment it is written.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.package_imports import SOURCES, alternatives, missing
from tests.contract.source import ROOT, Release, has_name, releases

RELEASES = releases()


def test_both_supported_releases_are_here() -> None:
    if len(RELEASES) < 2:
        pytest.skip(f"only {[r.version for r in RELEASES]} here: run scripts/vllm_source.py for the other")
    assert {release.version for release in RELEASES} >= {"installed", "0.33.0"}


def test_every_imported_name_exists(release: Release) -> None:
    assert [problem for _, problem in missing(release)] == []


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
