"""The tests' own order: folders mirror the package, and no test leans on another test."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "vllm_gptoss"
OF_THEIR_OWN = {"benchmarks", "contract", "demo", "e2e", "gpu", "soak", "support"}
"""Folders that mirror no folder of the package: benchmarks, vLLM's promises, the bundled model, servers, GPUs."""


def imports_of_tests(path: Path) -> list[tuple[int, str]]:
    """(line, module) of everything that a file imports from the tests."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            found.append((node.lineno, "." * node.level + (node.module or "")))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tests":
            is_package = (TESTS.parent / (node.module or "").replace(".", "/")).is_dir()
            found += [(node.lineno, f"{node.module}.{a.name}" if is_package else str(node.module)) for a in node.names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, a.name) for a in node.names if a.name.split(".")[0] == "tests"]
    return found


def strays(path: Path, folder: str) -> list[str]:
    """Imports of another test, or of helpers of another folder than `folder` (dotted)."""
    return [
        f"{path.name}:{line} imports {module}"
        for line, module in imports_of_tests(path)
        if module.split(".")[-1].startswith(("test_", "conftest"))
        or not module.startswith((f"{folder}.", "tests.support."))
    ]


def dotted(path: Path) -> str:
    return ".".join(("tests", *path.relative_to(TESTS).parent.parts))


def test_what_tests_share_is_in_support() -> None:
    found = [line for path in sorted(TESTS.rglob("*.py")) for line in strays(path, dotted(path))]
    assert not found, "move what is shared to tests/support:\n" + "\n".join(found)


def test_folders_mirror_the_package() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    alone = {folder for folder in folders if folder.parts and folder.parts[0] not in OF_THEIR_OWN}
    assert not {str(folder) for folder in alone if not (PACKAGE / folder).is_dir()}


def test_a_stray_import_would_be_seen(tmp_path: Path) -> None:
    written = tmp_path / "test_made_up.py"
    written.write_text(
        "from tests.server.responses.test_create import HELLO\n"
        "from tests.server.harmony import streams\n"
        "from tests.server.responses import helpers\n"
        "from tests.support.waiting import soon\n"
        "from .conftest import run\n"
    )
    assert strays(written, "tests.server.responses") == [
        "test_made_up.py:1 imports tests.server.responses.test_create",
        "test_made_up.py:2 imports tests.server.harmony.streams",
        "test_made_up.py:5 imports .conftest",
    ]
