"""No two public classes of the package share a name: a reader who finds one has found the right one."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "vllm_gptoss"


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    del places["Status"]  # of a finding in `cli/doctor`, of a recipe in `cli/recipes`
    assert not {name: files for name, files in places.items() if len(files) > 1}
