"""The npm clients that scripts/environment.py installs, and why they cannot run here."""

from __future__ import annotations

import shutil

from tests.support.places import CACHE

PACKAGES = CACHE / "clients" / "node_modules"


def missing(node: bool = True) -> str | None:
    """None where they can run. node: whether they are programs for node; a cache may be older than its absence."""
    if not (PACKAGES.parent / "digest").exists():
        return "no npm clients: scripts/environment.py installs them, where there is node"
    return "the npm clients are installed, but no node is here" if node and shutil.which("node") is None else None
