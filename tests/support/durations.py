"""Duration of each test in the last full run, which selects the tests of `make check` and orders `make test`.

`tests/durations.txt` has a line for each test function of more than half a second: the seconds of its longest case, of
all its cases with their fixtures, and its name. `make test DURATIONS=1` rewrites it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parents[1] / "durations.txt"
CASE_S, ALL_CASES_S = 1.0, 2.0
"""A test is slow when one of its cases takes longer than the first, or all of them together longer than the second."""

LISTED_S = 0.5


def read(path: Path = KEPT) -> dict[str, tuple[float, float]]:
    """Seconds of the longest case and of all, by `tests/…/test_file.py::test_function`."""
    lines = (line.split(maxsplit=2) for line in path.read_text("utf-8").splitlines())
    return {name: (float(longest), float(total)) for longest, total, name in lines}


@cache
def kept() -> dict[str, tuple[float, float]]:
    return read()


def function(nodeid: str) -> str:
    """The name of a test without its parameters."""
    return nodeid.partition("[")[0]


def is_slow(nodeid: str) -> bool:
    longest, total = kept().get(function(nodeid), (0.0, 0.0))
    return longest > CASE_S or total > ALL_CASES_S


def seconds_of_file(file: str) -> float:
    """Total duration of the slow tests of `tests/…/test_file.py`."""
    return _by_file().get(file, 0.0)


@cache
def _by_file() -> Mapping[str, float]:
    out: dict[str, float] = defaultdict(float)
    for name, (_, total) in kept().items():
        out[name.partition("::")[0]] += total
    return out


def leaves_out(expression: str, source: str) -> bool:
    """Whether `-m EXPRESSION`, of the form `not … and not …`, leaves out all tests of a file, by its `pytestmark`."""
    words = expression.split()
    if not words or any((word == "not") == bool(at % 3) for at, word in enumerate(words)) or "or" in words:
        return False
    said = re.search(r"^pytestmark = (\[\n.*?^\]|.*?$)", source, re.MULTILINE | re.DOTALL)
    return bool(said and set(re.findall(r"mark\.(\w+)", said[0])) & set(words[1::3]))


class Recorder:
    """Counts a run's seconds, and keeps them when it ends without a failure; what was skipped keeps what it took where
    it ran."""

    def __init__(self, path: Path = KEPT) -> None:
        self.path = path
        self.cases: dict[str, float] = defaultdict(float)
        self.skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.cases[report.nodeid] += report.duration
        if report.skipped:
            self.skipped.add(function(report.nodeid))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == 0:
            self.write()

    def write(self) -> None:
        found: dict[str, list[float]] = defaultdict(list)
        for nodeid, seconds in self.cases.items():
            found[function(nodeid)].append(seconds)
        rows = {name: (max(cases), sum(cases)) for name, cases in found.items() if sum(cases) > LISTED_S}
        before = read(self.path) if self.path.exists() else {}
        rows |= {name: was for name, was in before.items() if name in self.skipped}
        lines = [
            f"{longest:.1f} {total:.1f} {name}"
            for name, (longest, total) in sorted(rows.items(), key=lambda row: -row[1][1])
        ]
        self.path.write_text("\n".join(lines) + "\n", "utf-8")
