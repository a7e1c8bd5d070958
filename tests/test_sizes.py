"""Functions and files stay short enough to be read at once; a giant is refused on the day that it grows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "vllm_gptoss"
FUNCTION_P90, FUNCTION_MOST = 25, 60
FILE_P90, FILE_MOST = 300, 400
CUDA_MOST = 120
"""Lines. Kernels' host sides are files like any other; device code has a separate limit."""


def functions(source: str) -> Iterator[tuple[int, str]]:
    """(lines, name) of every function of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, node.name


def device_functions(source: str) -> Iterator[tuple[int, str]]:
    """(lines, how it begins) of every outermost block that is a function's."""
    plain = re.sub(r"//[^\n]*|/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found[0]), source, flags=re.DOTALL)
    opened: list[tuple[int, bool]] = []
    for brace in re.finditer(r"[{}]", plain):
        if brace[0] == "{":
            head = re.split(r"[;{}]|^\s*#.*$", plain[max(0, brace.start() - 2000) : brace.start()], flags=re.MULTILINE)[
                -1
            ]
            inside = any(function for _, function in opened)
            opened.append((brace.start(), not inside and bool(re.search(r"\)\s*(const)?\s*$", head))))
        else:
            start, function = opened.pop()
            if function:
                yield plain.count("\n", start, brace.start()) + 1, plain[:start].splitlines()[-1].strip()


def p90(sizes: list[int]) -> int:
    return sorted(sizes)[int(0.9 * (len(sizes) - 1))]


def sources(pattern: str) -> dict[Path, str]:
    return {path: path.read_text() for path in PACKAGE.rglob(pattern)}


def test_functions_are_short() -> None:
    found = [(*each, path.name) for path, text in sources("*.py").items() for each in functions(text)]
    assert len(found) > 2000
    assert not [each for each in found if each[0] > FUNCTION_MOST]
    assert p90([lines for lines, *_ in found]) <= FUNCTION_P90


def test_files_are_short() -> None:
    lines = {path.name: len(text.splitlines()) for path, text in sources("*.py").items()}
    assert not {name: each for name, each in lines.items() if each > FILE_MOST}
    assert p90(list(lines.values())) <= FILE_P90


def test_device_functions_are_short() -> None:
    found = [(*each, path.name) for path, text in sources("*.cu*").items() for each in device_functions(text)]
    assert len(found) > 100
    assert not [each for each in found if each[0] > CUDA_MOST]


def test_a_giant_would_be_seen() -> None:
    long = "    x = 1;\n" * CUDA_MOST
    kernel = f"namespace a {{\nstruct B {{ int x; }};\n__global__ void k(int a) {{ // }}\n{long}}}\nvoid f() {{}}\n}}\n"
    assert [lines for lines, _ in device_functions(kernel)] == [CUDA_MOST + 2, 1]
    assert list(functions(f"def f():\n{'    pass' + chr(10)}    x = 1\n")) == [(3, "f")]
    assert p90(list(range(11))) == 9
