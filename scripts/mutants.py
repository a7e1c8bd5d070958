"""`make mutants`: changes single expressions of risky code and counts how many changes a test notices.

    python -m scripts.mutants run [--only TEXT] [--again --seconds 300 --longest 60]
    python -m scripts.mutants report

A rule chooses the mutants (`scripts/mutant_rules.py`). A mutant's tests are the test file of its name, the test files
that import its module, and its mirrored folder, in this order. They run in a process forked after the imports until the
first fails. A test that detects a mutant must pass without it. `run` changes files of a copy of the tree only, and
continues where it stopped. `tests/mutants.yaml` lists the mutants that no test can detect, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import yaml

from scripts.mutant_rules import ROOT, Mutant, chosen
from tests.support import durations

CACHE = (ROOT / ".cache" / "mutants").resolve()
TREE = CACHE / "tree"
"""The copy, which has the same `.cache`."""
RESULT = CACHE / "result.json"
EQUIVALENT = ROOT / "tests" / "mutants.yaml"
SELECT = "not serve and not gpu and not soak and not alone"
WARM = (
    "vllm.entrypoints.openai.api_server",
    "openai",
    "mcp",
    "hypothesis",
    "sqlalchemy",
    "xgrammar",
    "httpx",
)
"""Modules that are imported before the forks: the imports take seconds."""
TEST_SECONDS = 25
"""Limit of one test: a mutant that makes a test wait is detected."""


class Tests:
    """A plugin of pytest: chooses and sorts the tests of one mutant, and records which pass and fail."""

    def __init__(self, longest: float) -> None:
        self.longest, self.log, self.end = longest, CACHE / "log", 0.0
        self.log.write_text("")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        seconds = {item: durations.kept().get(durations.function(item.nodeid), (0.1, 0.1))[0] for item in items}
        items[:] = [one for one in items if seconds[one] <= self.longest]
        items.sort(key=seconds.__getitem__)

    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self.end:
            pytest.exit("no time is left")

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed or (report.when == "call" and report.passed):
            with self.log.open("a") as file:
                file.write(f"{report.outcome} {report.nodeid}\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.pytest_runtest_logreport(report)

    def outcomes(self) -> tuple[set[str], list[str]]:
        """The passed and the failed tests."""
        found = [line.partition(" ")[::2] for line in self.log.read_text().splitlines()]
        return {test for outcome, test in found if outcome == "passed"}, [
            test for kind, test in found if kind == "failed"
        ]


@cache
def importers() -> dict[str, set[str]]:
    """The files of tests by a module that they import, themselves or through a module of tests."""
    named = {}
    for path in (ROOT / "tests").rglob("*.py"):
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        modules = {name for one in imports for name in (one.module, *(f"{one.module}.{it.name}" for it in one.names))}
        named[path.relative_to(ROOT)] = modules
    out = defaultdict(set)
    for file, modules in named.items():
        helpers = [named.get(Path(f"{module}".replace(".", "/") + ".py"), set()) for module in modules]
        for module in modules.union(*(helper for helper in helpers)):
            out[str(module)].add(str(file))
    return out


def files_of(mutant: Mutant, folder: str) -> list[str]:
    """The files of tests for a mutant: of its name, then importers, then the mirrored folder and those around it."""
    module, root = Path(mutant.file).with_suffix(""), Path("tests", folder)
    mirrored = "tests" / module.relative_to("vllm_gptoss").parent
    around = [mirrored, *mirrored.parents][: len(mirrored.parts) - len(root.parts) + 1]
    ranks: dict[str, int] = {}
    for rank, place in enumerate(around, 2):
        for path in (ROOT / place).rglob("test_*.py"):
            ranks.setdefault(str(path.relative_to(ROOT)), rank)
    ranks |= {file: 1 for file in importers()[".".join(module.parts)] if Path(file).name.startswith("test_")}
    ranks |= {file: 0 for file in ranks if Path(file).name == f"test_{module.name}.py"}
    return sorted(ranks, key=lambda file: (ranks[file], durations.seconds_of_file(file), file))


def forked(arguments: list[str], tests: Tests, limit: float) -> tuple[set[str], list[str]]:
    """Runs in a child process the tests that begin within `limit` seconds. Returns the passed and the failed ones."""
    tests.end = time.monotonic() + limit
    if (child := os.fork()) == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        plugins = [word for name in ("xdist", "cacheprovider", "cov") for word in ("-p", f"no:{name}")]
        options = ["-x", f"--timeout={TEST_SECONDS}", "-m", SELECT, *plugins]
        os._exit(any(pytest.main([*options, one], [tests]) not in (0, 5) for one in arguments))
    try:
        while not os.waitpid(child, os.WNOHANG)[0] and time.monotonic() < tests.end + 2 * TEST_SECONDS:
            time.sleep(0.02)
    finally:
        with suppress(OSError):
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return tests.outcomes()


def verdict(mutant: Mutant, folder: str, asked: argparse.Namespace, good: set[str], bad: set[str]) -> str:
    """The test that detects the mutant, or "". good: tests that pass without a mutant. bad: files with others."""
    path, files = ROOT / mutant.file, files_of(mutant, folder)
    before = path.read_bytes()
    while True:
        path.write_bytes(before[: mutant.start] + mutant.new.encode() + before[mutant.end :])
        try:
            passed, failed = forked([file for file in files if file not in bad], Tests(asked.longest), asked.seconds)
        finally:
            path.write_bytes(before)
        good |= passed
        if failed and failed[0] not in good:
            passed, wrong = forked(failed, Tests(asked.longest), 2 * TEST_SECONDS)
            good |= passed
            if wrong:
                bad.add(failed[0].partition("::")[0])
                print("fails without a mutant:", *wrong, flush=True)
                continue
        return failed[0] if failed else ""


def run_in_copy() -> None:
    """Copies the files that git does not ignore to `TREE`, and replaces this process by one that runs there."""
    shutil.rmtree(TREE, ignore_errors=True)
    TREE.mkdir(parents=True)
    listed = subprocess.check_output(("git", "ls-files", "-coz", "--exclude-standard"), cwd=ROOT, text=True)
    for name in listed.split("\0"):
        if (ROOT / name).is_file():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, TREE / name)
    (TREE / ".cache").symlink_to(ROOT / ".cache")
    # a mutant may have the size and the second of the file's bytecode
    environment = os.environ | {"PYTHONPATH": str(TREE), "PYTHONDONTWRITEBYTECODE": "1"}
    os.chdir(TREE)
    os.execve(sys.executable, [sys.executable, "-m", "scripts.mutants", *sys.argv[1:]], environment)  # noqa: S606


def run(asked: argparse.Namespace) -> None:
    """Tests the chosen mutants without a stored verdict, the folders in turn; with --again also those that survived."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the tests too
    verdicts = stored()
    good, bad = set(filter(None, verdicts.values())), set[str]()
    for module in WARM:
        importlib.import_module(module)
    rounds = zip(*([(folder, one) for one in mutants] for folder, mutants in chosen().items()), strict=True)
    for folder, mutant in chain.from_iterable(rounds):
        is_open = mutant.key not in verdicts or (asked.again and not verdicts[mutant.key] + is_equivalent(mutant))
        if is_open and asked.only in mutant.key:
            found = verdicts[mutant.key] = verdict(mutant, folder, asked, good, bad)
            RESULT.write_text(json.dumps(verdicts, indent=1))
            print(f"{mutant.file}:{mutant.line}", mutant.key.partition(":")[2], "|", found or "SURVIVED", flush=True)
    report()


def stored() -> dict[str, str]:
    """The detecting test, or "", by mutant."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def is_equivalent(mutant: Mutant) -> str:
    """Why no test can detect the mutant; "" for others."""
    return _equivalent().get(mutant.key, "")


@cache
def _equivalent() -> dict[str, str]:
    return yaml.safe_load(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}


def report() -> None:
    """Prints the score of each folder, as the table of docs/testing.md, and the survivors."""
    print("| folder | mutants | detected | equivalent | score |\n|---|---|---|---|---|")
    verdicts, left = stored(), []
    for folder, mutants in chosen().items():
        tested = [mutant for mutant in mutants if mutant.key in verdicts]
        survived = [mutant for mutant in tested if not verdicts[mutant.key]]
        open_ = [mutant for mutant in survived if not is_equivalent(mutant)]
        found, same, left = len(tested) - len(survived), len(survived) - len(open_), left + open_
        print(f"| `{folder}` | {len(tested)} | {found} | {same} | {100 * found / max(1, len(tested) - same):.0f} % |")
    print(*(f"{mutant.file}:{mutant.line} {mutant.key.partition(':')[2]}" for mutant in left), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "report"))
    parser.add_argument("--only", default="", help="mutants whose file or function contains this")
    parser.add_argument("--again", action="store_true", help="test survivors again")
    parser.add_argument("--seconds", type=float, default=30, help="limit of one mutant")
    parser.add_argument("--longest", type=float, default=5, help="leave out longer tests, by tests/durations.txt")
    asked = parser.parse_args()
    if asked.action == "report":
        return report()
    run(asked) if ROOT == TREE else run_in_copy()


if __name__ == "__main__":
    main()
