"""Packages of `make demo` and `make test`: each has hashes, and a version that pyproject.toml allows."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.places import ROOT

HASHED = r"\S+==\S+( ; [^\\\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n"
TORCH = {"torch"}
"""scripts/environment.py installs it: its CPU build is not on PyPI."""


def packages(name: str) -> dict[str, set[str]]:
    """Versions by name."""
    found: dict[str, set[str]] = {}
    for line in re.finditer(r"^([\w.-]+)\S*?==(\S+)", (ROOT / "requirements" / f"{name}.txt").read_text(), re.M):
        found.setdefault(canonicalize_name(line[1]), set()).add(line[2])
    return found


@pytest.mark.parametrize("name", ["demo", "test"])
def test_every_package_has_hashes(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert re.fullmatch(f"#.*\n({HASHED})+", text)


def test_every_declared_dependency_is_in_a_version_that_it_allows() -> None:
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = metadata["project"]["optional-dependencies"]
    demo = [*metadata["project"]["dependencies"], *extras["cpu"], *extras["python-tool"]]
    test = [*extras["eval"], *extras["portable"], *extras["postgres"], *extras["s3"]]
    test += [line for group in metadata["dependency-groups"].values() for line in group]
    there = packages("demo")
    for lines in (demo, test):
        for wanted in map(Requirement, lines):
            if wanted.name not in TORCH:
                versions = there[canonicalize_name(wanted.name)]
                assert list(wanted.specifier.filter(versions)), f"{wanted}: {versions}; python scripts/lock.py"
        there = there | packages("test")
    assert not packages("demo").keys() & packages("test").keys()
