"""Imports inside `server/responses/` go one way: a folder may import only the folders below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import vllm_gptoss.server.responses

PACKAGE = Path(vllm_gptoss.server.responses.__file__).parent
BASE = {"errors", "ids", "metrics", "options"}
ROOMS: dict[str, set[str]] = {
    "endpoint": {"transport", "run", "prompt", "state", "request", *BASE},
    "transport": {"run", "state", "request", *BASE},
    "run": {"prompt", "state", "request", *BASE},
    "prompt": {"request", *BASE},
    "state": {"request", *BASE},
    "request": BASE,
    "options": set(),
    "errors": set(),
    "ids": set(),
    "metrics": set(),
}
"""Each room and what it may import besides itself."""


def imported(file: Path) -> Iterator[str]:
    """Modules of the package that `file` imports, also inside functions, as `room.module`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm_gptoss.server.responses"):
            below = (node.module or "").removeprefix("vllm_gptoss.server.responses").removeprefix(".")
            yield from ([below] if below else (alias.name for alias in node.names))


def test_no_room_knows_one_above_it() -> None:
    wrong = []
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for target in imported(file):
            other = target.split(".")[0]
            if other != room and other not in ROOMS.get(room, set()):
                wrong.append(f"{file.relative_to(PACKAGE)} imports {target}")
    assert not wrong


def test_every_room_says_what_comes_in_and_out() -> None:
    for room in PACKAGE.glob("*/__init__.py"):
        words = ast.get_docstring(ast.parse(room.read_text())) or ""
        assert "In: " in words, room
        assert "Out: " in words, room
