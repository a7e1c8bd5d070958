"""Tests can fail: no `or` in an assertion, no assertion on a constant, no test without a check, no skip for a package
that the environment installs, no fixed sleep before a single look."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RAISING = {"raises", "fail", "warns", "AssertionError", "assert_close"}
"""Names whose call is a check in itself."""

EXCEPTIONS = {
    "unchecked": {  # that no exception comes is what is tested
        "tests/server/harmony/test_grammar.py::test_vllm_accepts_the_tag",
        "tests/server/harmony/test_schema.py::test_no_schema_raises",
        "tests/tools/browser/test_guard.py::test_ordinary_urls_pass_the_scheme_check",
    },
    "sleeping": {"tests/tools/mcp/test_answers.py::test_a_restless_server_is_asked_once_a_second"},  # counts in a time
}


@cache
def trees() -> dict[str, ast.Module]:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text("utf-8")) for path in paths}


def name(call: ast.expr) -> str:
    """The last part of what is called: `fail` of `pytest.fail(…)`."""
    return getattr(call, "attr", getattr(call, "id", ""))


def calls(node: ast.AST) -> set[str]:
    return {name(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def checks(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Assert) for each in ast.walk(node)) or bool(calls(node) & RAISING)


@cache
def checking() -> frozenset[str]:
    """Names of functions in `tests` that check something, themselves or through another of them."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    nodes = [each for tree in trees().values() for each in ast.walk(tree) if isinstance(each, kinds)]
    made = [(each.name, calls(each)) for each in nodes if not each.name.startswith("test_")]
    found = {each.name for each in nodes if checks(each)}
    while more := {title for title, called in made if title not in found and called & found}:
        found |= more
    return frozenset(found)


def alternatives(tree: ast.AST) -> Iterator[ast.AST]:
    """Assertions that one of several results satisfies."""

    def either(test: ast.expr) -> bool:
        if isinstance(test, ast.UnaryOp):
            return either(test.operand)
        return isinstance(test, ast.BoolOp) and (isinstance(test.op, ast.Or) or any(map(either, test.values)))

    return (node for node in ast.walk(tree) if isinstance(node, ast.Assert) and either(node.test))


def constants(tree: ast.AST) -> Iterator[ast.AST]:
    """Assertions whose outcome the source decides."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            test = node.test
            sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else [test]
            same = len(sides) == 2 and not calls(test) and ast.dump(sides[0]) == ast.dump(sides[1])
            if same or isinstance(test, ast.Tuple) or all(isinstance(each, ast.Constant) for each in sides):
                yield node


def unchecked(tree: ast.AST) -> Iterator[ast.AST]:
    """Tests that nothing but an unexpected exception fails."""
    for test in functions(tree):
        if test.name.startswith("test_") and not checks(test) and not calls(test) & checking():
            yield test


def skipped(tree: ast.AST) -> Iterator[ast.AST]:
    """`importorskip` of a package that is installed: where it is missing, the test must fail."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name(node.func) == "importorskip":
            package = ast.literal_eval(node.args[0]).partition(".")[0]
            if importlib.util.find_spec(package):
                yield node


def sleeping(tree: ast.AST, looped: bool = False) -> Iterator[ast.AST]:
    """A sleep and then an assertion, in no loop: too short on a slow machine, too long on any other."""
    body = [each for each in ast.iter_child_nodes(tree) if isinstance(each, ast.stmt)]
    for first, then in pairwise(body):
        if not looped and isinstance(first, ast.Expr) and isinstance(then, ast.Assert) and calls(first) == {"sleep"}:
            zero = any(isinstance(each, ast.Constant) and each.value == 0 for each in ast.walk(first))
            yield from [] if zero else [first]
    for each in body:
        yield from sleeping(each, looped or isinstance(each, ast.For | ast.While))


def at(file: str, tree: ast.Module, node: ast.AST) -> str:
    """`tests/…/test_file.py::function` of a node, or its line outside of functions."""
    inside = [each.name for each in functions(tree) if each.lineno <= node.lineno <= (each.end_lineno or 0)]  # type: ignore[attr-defined]
    return f"{file}::{inside[0] if inside else node.lineno}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("rule", [alternatives, constants, unchecked, skipped, sleeping])
def test_no_test_is_vacuous(rule: Callable[[ast.AST], Iterator[ast.AST]]) -> None:
    found = {at(file, tree, node) for file, tree in trees().items() for node in rule(tree)}
    assert found == EXCEPTIONS.get(rule.__name__, set())
