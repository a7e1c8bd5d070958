"""`make mutants`: changes single expressions of risky code and counts how many changes a test notices.

    python -m scripts.mutants measure            # runs the tests once and stores which lines each executes
    python -m scripts.mutants run [--only TEXT]  # tests every chosen mutant; continues where it stopped

A rule chooses the mutants, not a person: `candidates` lists every change of every file, and each folder of `FOLDERS`
contributes the `PER_FOLDER` with the smallest SHA-256 of file, function and change. Of a mutant only those tests run
that execute its line, the fastest first, in a process forked after the imports. A mutant is detected when a test fails
or exceeds its time. Survivors that no test can detect are listed with their reason in `tests/mutants.yaml`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "mutants"
RESULT = CACHE / "result.json"
EQUIVALENT = ROOT / "tests" / "mutants.yaml"
FOLDERS = {
    "server/responses": "tests/server/responses",
    "server/harmony": "tests/server/harmony",
    "tools": "tests/tools",
    "engine/runner": "tests/engine/runner",
    "engine/choose": "tests/engine/choose",
    "cli/recipes": "tests/cli/recipes",
}
PER_FOLDER = 55
SELECT = "not serve and not gpu and not soak"
MOST_TESTS = 60
"""Tests of one mutant: the fastest that execute its line."""
SECONDS = 120.0
"""Limit of one mutant's tests."""
COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
SKIPPED = ("info", "debug", "warning", "error", "log", "echo", "print", "secho")
"""Calls that only write a message."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of the text of one file. start, end: character offsets of what `new` replaces."""

    file: str
    line: int
    function: str
    start: int
    end: int
    old: str
    new: str

    @property
    def key(self) -> str:
        """Stable while the function does not change: lines above it may."""
        return f"{self.file}::{self.function}: {' '.join(self.old.split())} -> {self.new}"


class Finder(ast.NodeVisitor):
    """Lists the mutants of one file."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text, self.found = file, text, list[Mutant]()
        self.names: list[str] = []
        raw = text.encode()
        lines = raw.splitlines(keepends=True)
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line))
        self.raw = raw

    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return start, end

    def add(self, node: ast.AST, new: str, span: tuple[int, int] | None = None) -> None:
        start, end = span or self.span(node)
        old = self.raw[start:end].decode()
        if self.names and old != new:
            self.found.append(Mutant(self.file, node.lineno, ".".join(self.names), start, end, old, new))  # type: ignore[attr-defined]

    def source(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.raw[start:end].decode()

    def _named(self, node: Any) -> None:
        self.names.append(node.name)
        for child in node.body:
            self.visit(child)
        self.names.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _named

    def visit_If(self, node: ast.If) -> None:
        if self.source(node.test) != "TYPE_CHECKING":
            self.add(node.test, f"(not ({self.source(node.test)}))")
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.add(node.test, f"(not ({self.source(node.test)}))")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left: ast.AST = node.left
        for operation, right in zip(node.ops, node.comparators, strict=True):
            between = (self.span(left)[1], self.span(right)[0])
            self.add(right, f" {COMPARED[type(operation)]} ", between)
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            between = (self.span(left)[1], self.span(right)[0])
            text = self.raw[slice(*between)].decode()
            word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            if text.count(word) == 1:
                self.add(right, text.replace(word, other), between)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, str(not node.value))
        elif isinstance(node.value, int):
            self.add(node, str(node.value + 1))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = {ast.Add: " - ", ast.Sub: " + "}.get(type(node.op))
        if other and not isinstance(node.left, ast.Constant | ast.JoinedStr | ast.List | ast.Tuple):
            between = (self.span(node.left)[1], self.span(node.right)[0])
            if self.raw[slice(*between)].decode().strip() in "+-":
                self.add(node.right, other, between)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.add(node.value, "None")
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        called = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(called, ast.Call):
            return
        name = called.func.attr if isinstance(called.func, ast.Attribute) else getattr(called.func, "id", "")
        if name not in SKIPPED:
            self.add(node, "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "pass")
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """An assertion tells the type checker something."""

    def visit_arguments(self, node: ast.arguments) -> None:
        """Annotations and defaults are not changed."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)


def candidates(folder: str) -> list[Mutant]:
    """Every mutant of `vllm_gptoss/FOLDER`."""
    found = []
    for path in sorted((ROOT / "vllm_gptoss" / folder).rglob("*.py")):
        text = path.read_text()
        finder = Finder(str(path.relative_to(ROOT)), text)
        finder.visit(ast.parse(text))
        found += finder.found
    return list({mutant.key: mutant for mutant in found}.values())


def chosen() -> dict[str, list[Mutant]]:
    """The mutants of each folder."""
    order = lambda mutant: hashlib.sha256(mutant.key.encode()).digest()  # noqa: E731
    return {folder: sorted(candidates(folder), key=order)[:PER_FOLDER] for folder in FOLDERS}


def measure() -> None:
    """Runs the tests of all folders once, with coverage by test."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for old in CACHE.glob(".coverage*"):
        old.unlink()
    environment = {**os.environ, "COVERAGE_FILE": str(CACHE / ".coverage")}
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", SELECT, "-n1", "--dist=loadfile", "--cov", "--cov-context=test",
         "--cov-report=", f"--junitxml={CACHE / 'times.xml'}", *FOLDERS.values()],
        cwd=ROOT, env=environment, check=False,
    )  # fmt: skip


class Lines:
    """Which tests execute a line, the fastest first."""

    def __init__(self) -> None:
        from xml.etree import ElementTree

        self.seconds: dict[str, float] = {}
        for case in ElementTree.parse(CACHE / "times.xml").iter("testcase"):
            name = case.get("classname", "").replace(".", "/") + ".py::" + case.get("name", "")
            self.seconds[name] = float(case.get("time") or 0)
        base = sqlite3.connect(CACHE / ".coverage")
        self.files = {Path(path): number for number, path in base.execute("SELECT id, path FROM file")}
        self.contexts = {
            number: text.partition("|")[0] for number, text in base.execute("SELECT id, context FROM context")
        }
        self.base = base

    def tests(self, file: str, line: int) -> list[str]:
        number = self.files.get(ROOT / file)
        found = set()
        for context, bits in self.base.execute("SELECT context_id, numbits FROM line_bits WHERE file_id = ?", (number,)):
            if line // 8 < len(bits) and bits[line // 8] >> line % 8 & 1 and self.contexts[context]:
                found.add(self.contexts[context])
        return sorted(found, key=lambda name: self.seconds.get(name, 9.0))[:MOST_TESTS]


def preload() -> None:
    """Imports what tests need, but nothing of this project: a forked process has only to import that."""
    code = "import sys, pytest; pytest.main(['--collect-only', '-qq', '-m', sys.argv[1], *sys.argv[2:]]); "
    code += "print('MODULES', *{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code, SELECT, *FOLDERS.values()], cwd=ROOT, capture_output=True, text=True
    )
    names = next(line for line in done.stdout.splitlines() if line.startswith("MODULES")).split()[1:]
    for name in sorted(set(names) - {"vllm_gptoss", "tests", "demo", "scripts", "benchmarks"}):
        if not name.startswith("_"):
            try:
                __import__(name)
            except BaseException:  # noqa: BLE001, S112  an optional module of somebody else
                continue


def test(mutant: Mutant, tests: list[str]) -> str:
    """`detected`, `time` or `survived`, by the tests in a forked process. The file is restored."""
    path = ROOT / mutant.file
    before = path.read_bytes()
    path.write_bytes(before[: mutant.start] + mutant.new.encode() + before[mutant.end :])
    try:
        child = os.fork()
        if child == 0:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            import pytest

            code = pytest.main(["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:cov", *tests])
            os._exit(int(code))
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            number, status = os.waitpid(child, os.WNOHANG)
            if number:
                return "survived" if os.waitstatus_to_exitcode(status) in (0, 5) else "detected"
            time.sleep(0.02)
        return "time"
    finally:
        path.write_bytes(before)
        try:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except OSError:
            pass


def run(only: str) -> None:
    """Tests the chosen mutants whose verdict is not stored yet, and prints the score."""
    # A mutant may have the size and the second of the file's bytecode.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    verdicts: dict[str, str] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    lines = Lines()
    preload()
    for folder, mutants in chosen().items():
        for mutant in mutants:
            if mutant.key in verdicts or only not in mutant.key:
                continue
            tests = lines.tests(mutant.file, mutant.line)
            verdicts[mutant.key] = test(mutant, tests) if tests else "no test"
            RESULT.write_text(json.dumps(verdicts, indent=1))
            print(folder, verdicts[mutant.key], f"{mutant.file}:{mutant.line}", mutant.key.partition("::")[2], flush=True)
    report(verdicts)


def report(verdicts: dict[str, str]) -> None:
    """Prints the score of each folder, as the table of docs/testing.md."""
    import yaml

    equivalent = yaml.safe_load(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    print("| folder | mutants | detected | equivalent | score |\n|---|---|---|---|---|")
    for folder, mutants in chosen().items():
        keys = [mutant.key for mutant in mutants if mutant.key in verdicts]
        same = sum(key in equivalent for key in keys)
        found = sum(verdicts[key] in ("detected", "time") for key in keys)
        print(f"| `{folder}` | {len(keys)} | {found} | {same} | {100 * found / max(1, len(keys) - same):.0f} % |")


def _survivors(verdicts: dict[str, str]) -> Iterator[str]:
    by: dict[str, list[str]] = defaultdict(list)
    for key, verdict in verdicts.items():
        by[verdict].append(key)
    yield from by["survived"] + by["no test"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("measure", "run", "report", "survivors"))
    parser.add_argument("--only", default="", help="mutants whose file or function contains this")
    asked = parser.parse_args()
    if asked.action == "measure":
        measure()
    elif asked.action == "run":
        run(asked.only)
    elif asked.action == "report":
        report(json.loads(RESULT.read_text()))
    else:
        print("\n".join(_survivors(json.loads(RESULT.read_text()))))


if __name__ == "__main__":
    main()
