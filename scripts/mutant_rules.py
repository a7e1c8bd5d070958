"""The mutants of `scripts/mutants.py`: every change of every file of the folders, of which a rule chooses some.

Each folder contributes the `PER_FOLDER` changes with the smallest SHA-256 of file, function and change.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("server/responses", "server/harmony", "tools", "engine/runner", "engine/choose", "cli/recipes")
PER_FOLDER = 55
COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
SKIPPED = ("info", "debug", "warning", "error", "log", "echo", "print", "secho")
"""Calls that only write a message."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one file. start, end: byte offsets of `old`, which `new` replaces."""

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


class Source:
    """One file, and the mutants in its functions."""

    def __init__(self, path: Path) -> None:
        self.file, self.raw, self.found = str(path.relative_to(ROOT)), path.read_bytes(), list[Mutant]()
        self.starts = [0, *accumulate(len(line) for line in self.raw.splitlines(keepends=True))]
        self.walk(ast.parse(self.raw), ())

    def walk(self, node: Any, names: tuple[str, ...]) -> None:
        if is_left_out(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside, names = node.body, (*names, node.name)
        else:
            for (start, end), new in self.changes(node) if names else ():
                old = self.raw[start:end].decode()
                line = self.raw.count(b"\n", 0, start) + 1
                self.found.append(Mutant(self.file, line, ".".join(names), start, end, old, new))
            inside = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.AnnAssign):
            inside = [node.value]
        for child in inside if not isinstance(node, ast.Raise) else ():
            self.walk(child, names)

    def changes(self, node: Any) -> Iterator[tuple[tuple[int, int], str]]:  # noqa: C901
        """(span, its replacement) for each change of one node, not of those inside."""
        match node:
            case ast.If(test=test) | ast.IfExp(test=test):
                yield self.span(test), f"(not ({self.text(*self.span(test))}))"
            case ast.Compare():
                for left, right, kind in zip([node.left, *node.comparators], node.comparators, node.ops, strict=False):
                    if not set("()") & set(self.text(*self.between(left, right))):
                        yield self.between(left, right), f" {COMPARED[type(kind)]} "
            case ast.BoolOp():
                word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in pairwise(node.values):
                    if (text := self.text(*self.between(left, right))).count(word) == 1:
                        yield self.between(left, right), text.replace(word, other)
            case ast.Constant(value=bool(value)):
                yield self.span(node), str(not value)
            case ast.Constant(value=int(value)):
                yield self.span(node), str(value + 1)
            case ast.BinOp(op=ast.Add() | ast.Sub() as kind, left=left, right=right):
                is_text = isinstance(left, ast.Constant | ast.JoinedStr | ast.List | ast.Tuple)
                if not is_text and self.text(*self.between(left, right)).strip() in "+-":
                    yield self.between(left, right), " - " if isinstance(kind, ast.Add) else " + "
            case ast.Return():
                yield self.span(node.value), "None"
            case ast.Raise() | ast.Expr() | ast.AugAssign():
                yield self.span(node), "pass"

    def span(self, node: Any) -> tuple[int, int]:
        start, end = self.starts[node.lineno - 1], self.starts[node.end_lineno - 1]
        return start + node.col_offset, end + node.end_col_offset

    def between(self, left: ast.AST, right: ast.AST) -> tuple[int, int]:
        return self.span(left)[1], self.span(right)[0]

    def text(self, start: int, end: int) -> str:
        return self.raw[start:end].decode()


def is_left_out(node: Any) -> bool:
    """Whether neither a node nor what is inside is changed: annotations, defaults, types, messages."""
    match node:
        case ast.Expr(value=ast.Call(func=called) | ast.Await(value=ast.Call(func=called))):
            return getattr(called, "attr", getattr(called, "id", "")) in SKIPPED
        case ast.Return(value=None | ast.Constant(value=None)) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return node is None or isinstance(node, ast.Assert | ast.arguments | ast.Expr)


def candidates(folder: str) -> list[Mutant]:
    """Every mutant of `vllm_gptoss/FOLDER`."""
    paths = sorted((ROOT / "vllm_gptoss" / folder).rglob("*.py"))
    return list({mutant.key: mutant for path in paths for mutant in Source(path).found}.values())


def chosen() -> dict[str, list[Mutant]]:
    """The mutants of each folder."""
    order = lambda mutant: hashlib.sha256(mutant.key.encode()).digest()  # noqa: E731
    return {folder: sorted(candidates(folder), key=order)[:PER_FOLDER] for folder in FOLDERS}
