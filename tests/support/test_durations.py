"""The list of slow tests names tests that there are, and `make check` leaves nothing out but those."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import durations

ROOT = Path(__file__).parents[2]
CHECK = "not vllm and not slow"


def test_every_line_names_a_test() -> None:
    """One that was renamed would run in `make check` again; `make test DURATIONS=1` rewrites the list."""
    there = {}
    for path in sorted({name.partition("::")[0] for name in durations.kept()}):
        nodes = ast.walk(ast.parse((ROOT / path).read_text())) if (ROOT / path).exists() else ()
        there[path] = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert [name for name in durations.kept() if name.split("::")[-1] not in there[name.partition("::")[0]]] == []


def test_what_was_measured_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "durations.txt"
    path.write_text("30.0 30.0 tests/a.py::test_skipped\n9.0 9.0 tests/a.py::test_gone\n")
    recorder = durations.Recorder(path)
    cases = {"tests/a.py::test_x[1]": 0.4, "tests/a.py::test_x[a::b[2]]": 0.7, "tests/a.py::test_y": 0.1}
    for nodeid, seconds in cases.items():
        for part in (seconds / 4, seconds * 3 / 4):  # its setup and its call
            recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=part, skipped=False))
    recorder.pytest_runtest_logreport(SimpleNamespace(nodeid="tests/a.py::test_skipped", duration=0.0, skipped=True))
    recorder.pytest_sessionfinish(1)
    assert "tests/a.py::test_gone" in durations.read(path), "a failed run measures nothing"
    recorder.pytest_sessionfinish(0)
    assert durations.read(path) == {
        "tests/a.py::test_skipped": (30.0, 30.0),
        "tests/a.py::test_x": (0.7, pytest.approx(1.1)),
    }


@pytest.mark.parametrize(
    ("expression", "source", "left_out"),
    [
        (CHECK, "pytestmark = pytest.mark.vllm", True),
        (CHECK, "pytestmark = [pytest.mark.namespaces, pytest.mark.slow]", True),
        (CHECK, "pytestmark = [\n    pytest.mark.namespaces,\n    pytest.mark.slow,\n]\n", True),
        (CHECK, "pytestmark = pytest.mark.namespaces\n\n\n@pytest.mark.slow\ndef test_x(): ...", False),
        (CHECK, "@pytest.mark.slow\ndef test_x(): ...", False),
        (CHECK + " or gpu", "pytestmark = pytest.mark.slow", False),
        ("vllm and not slow", "pytestmark = pytest.mark.vllm", False),
        ("slow", "pytestmark = pytest.mark.slow", False),
        ("", "pytestmark = pytest.mark.slow", False),
    ],
)
def test_only_files_without_a_chosen_test_are_not_read(expression: str, source: str, left_out: bool) -> None:
    assert durations.leaves_out(expression, source) == left_out
