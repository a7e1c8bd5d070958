"""A test that measures time would fail because of a concurrent test."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from tests.support.places import ROOT
from tests.support.turns import alone_in, turn
from tests.support.waiting import soon

HOLDS = """
import sys
from pathlib import Path
from tests.support.turns import turn
with turn(Path(sys.argv[1]), alone=sys.argv[2] == "alone"):
    print("in", flush=True)
    sys.stdin.readline()
"""


def other(folder: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDS, str(folder), how]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def waits_until_it_is_in(process: subprocess.Popen[str]) -> None:
    assert process.stdout.readline() == "in\n"


def leaves(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", 60)
    assert process.returncode == 0


def held(lock: Path) -> bool:
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_who_shares_runs_beside_the_others(tmp_path: Path) -> None:
    with turn(tmp_path, alone=False):
        beside = other(tmp_path, "shared")
        waits_until_it_is_in(beside)
        leaves(beside)


def test_who_is_alone_waits_for_the_others_and_lets_nobody_past(tmp_path: Path) -> None:
    with turn(tmp_path, alone=False):
        alone = other(tmp_path, "alone")
        soon(lambda: held(tmp_path / "gate"))
        behind = other(tmp_path, "shared")
        assert not held(tmp_path / "machine"), "the one that wants to be alone is in already"
    waits_until_it_is_in(alone)
    assert held(tmp_path / "machine")
    leaves(alone)
    waits_until_it_is_in(behind)
    leaves(behind)


def test_every_mark_is_found_without_an_import() -> None:
    """A test that is not found waits for the others among the tests of its file."""
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if "\n@pytest.mark.alone\n" in file.read_text()]
    assert len(files) > 5
    for file in files:
        assert len(alone_in(file)) == file.read_text().count("\n@pytest.mark.alone\n"), file
