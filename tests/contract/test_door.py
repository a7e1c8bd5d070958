"""The lists of `written.py` match the source: imports of vLLM, replaced and written attributes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import pytest

from tests.contract.source import ROOT
from tests.contract.written import FILLED, OURS, REPLACED, SUBCLASSES

PACKAGE = ROOT / "vllm_gptoss"
DOOR = "_vllm/"
PROGRAMS = "cli/bench/"
"""Benchmarks run vLLM, with the plugin and without, as a user's program does: by its public `LLM`."""


def of_vllm(node: ast.AST) -> list[str]:
    """Names that an import statement takes from vLLM; `module` itself for `import vllm.x`."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm" and not node.level:
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] == "vllm"]
    return []


def imported(tree: ast.Module) -> set[str]:
    """Names that a file takes from vLLM when it runs: imports under TYPE_CHECKING do not count."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    return {name for node in ast.walk(tree) if id(node) not in typing_only for name in of_vllm(node)}


def set_attributes(tree: ast.Module) -> Iterator[str]:
    """Every attribute that a file sets on anything but `self` and `cls`; `x[name]` for `setattr(x, name, …)`."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Delete) else [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr", "object.__setattr__"):
            yield f"{ast.unparse(node.args[0])}[{ast.unparse(node.args[1])}]"
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                attribute = one.value if isinstance(one, ast.Subscript) else one  # an entry of a table counts as well
                if isinstance(attribute, ast.Attribute) and not ast.unparse(one).startswith(("self.", "cls.")):
                    yield ast.unparse(one)


def sees_vllm(tree: ast.Module) -> bool:
    names = {
        alias.name.split(".")[0] if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return any(name == "vllm" or name.startswith(("vllm.", "vllm_gptoss._vllm")) for name in names)


NAMED = {*FILLED, *SUBCLASSES, *OURS, *REPLACED.values()}


@pytest.fixture(scope="module")
def trees() -> Mapping[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def test_only_the_door_imports_vllm_but_for_bases_of_subclasses(trees: Mapping[str, ast.Module]) -> None:
    outside = {name: imported(tree) for name, tree in trees.items() if not name.startswith((DOOR, PROGRAMS))}
    found = {name: frozenset(names) for name, names in outside.items() if names}
    assert found == SUBCLASSES


@pytest.mark.parametrize("file", SUBCLASSES)
def test_what_is_said_to_be_a_base_is_one(trees: Mapping[str, ast.Module], file: str) -> None:
    names = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(trees[file])
        if isinstance(node, ast.ImportFrom) and of_vllm(node)
        for alias in node.names
    }
    bases = {
        names.get(base.id)
        for node in ast.walk(trees[file])
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name)
    }
    borrowed = {"GptOssMxfp4MoEMethod"} if file == "engine/experts/dequantize.py" else set()  # its `create_weights`
    assert SUBCLASSES[file] == (bases & set(names.values())) | borrowed


def test_nothing_else_of_vllm_is_set(trees: Mapping[str, ast.Module]) -> None:
    found, listed = {}, {}
    for file, tree in trees.items():
        if (file.startswith(DOOR) or file in NAMED or sees_vllm(tree)) and not file.startswith(PROGRAMS):
            said = {attribute for attribute, where in REPLACED.items() if where == file} | FILLED.get(file, set())
            found[file], listed[file] = set(set_attributes(tree)), said | OURS.get(file, set())
    assert found == listed
    assert found.keys() >= NAMED


def test_the_document_lists_every_replaced_attribute() -> None:
    document = (ROOT / "docs" / "harmony.md").read_text()
    rows = document.partition("| replaced | by | because |\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert len(rows) == len(REPLACED)
    for attribute in REPLACED:
        assert any(attribute.rpartition(".")[2] in row for row in rows), attribute


def test_a_new_patch_would_be_seen() -> None:
    tree = ast.parse("from vllm.a import B\nB.go = 1\nsetattr(B, 'x', 2)\nb.c[0].d = 3\nself.e = 4\nx, B.y = 5, 6")
    assert imported(tree) == {"B"}
    assert set(set_attributes(tree)) == {"B.go", "B['x']", "b.c[0].d", "B.y"}
