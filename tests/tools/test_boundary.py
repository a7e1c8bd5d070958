"""`tools/` could be a separate package: it imports nothing of the rest, and the rest imports one of its modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_gptoss.tools import confined
from vllm_gptoss.tools.gate import GatedSession, gated
from vllm_gptoss.tools.protocol import ToolProvider, ToolSession

PACKAGE = Path(__file__).parents[2] / "vllm_gptoss"
TOOLS = PACKAGE / "tools"
PROTOCOL = "vllm_gptoss.tools.protocol"
PARENT = "vllm_gptoss.tools"
"""`from vllm_gptoss.tools import protocol` names the package too."""

CONFINED = "vllm_gptoss.tools.confined"
"""Workers for untrusted data, clients' schemas among them: its own face, which is not about tools."""

DOCUMENTS = "vllm_gptoss.tools.documents"
"""Reads a client's PDF in such a worker: a separate interface too."""

YAML_FILE = "vllm_gptoss.tools.yaml_file"
"""Reads an operator's YAML: not about tools either."""

SHARED = tuple(
    f"vllm_gptoss.tools.{name}." for name in ("slots", "unreadable", "confined.json_tree", "confined.json_value")
)
"""Turns of callers, descriptions of unreadable files, and counted JSON: not about tools either."""

ROOTS = {"endpoint.py", "parts.py"}
"""Files that connect the parts."""


def imported(path: Path) -> Iterator[str]:
    """Every module of this package that the file names, at the top or inside a function."""
    here = ["vllm_gptoss", *path.relative_to(PACKAGE).with_suffix("").parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: -node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in found if name.startswith("vllm_gptoss."))


def test_tools_import_nothing_from_the_rest() -> None:
    files = list(TOOLS.rglob("*.py"))
    assert len(files) > 40
    wrong = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in files
        for name in imported(path)
        if not f"{name}.".startswith("vllm_gptoss.tools.")
    }
    assert wrong == set()


def test_the_serving_core_knows_tools_by_the_protocol_alone() -> None:
    wrong = set()
    for folder in ("server",):
        for path in (PACKAGE / folder).rglob("*.py"):
            names = {name for name in imported(path) if name.startswith("vllm_gptoss.tools")}
            names -= {PARENT, CONFINED, *(f"{CONFINED}.{name}" for name in confined.__all__)}
            names = {name for name in names if not f"{name}.".startswith((f"{DOCUMENTS}.", f"{YAML_FILE}.", *SHARED))}
            if path.name not in ROOTS and any(not f"{n}.".startswith(f"{PROTOCOL}.") for n in names):
                wrong.add(f"{path.relative_to(PACKAGE)}: {sorted(names)}")
    assert wrong == set()


def test_nobody_looks_inside_the_gate() -> None:
    users = [*(PACKAGE / "server" / "responses").rglob("*.py"), *TOOLS.glob("*.py")]
    inner = {
        path.name
        for path in users
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr == "inner"
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }
    named = {path.name for path in users if '"inner"' in path.read_text()}
    assert inner | named == set()


def test_the_gate_forwards_every_member_of_a_provider_but_opens_its_sessions() -> None:
    names = {name for name in vars(ToolProvider) if not name.startswith("_")}
    inner: Any = SimpleNamespace(**{name: object() for name in names})
    assert {name for name in names if getattr(gated(inner), name) is not getattr(inner, name)} == {"open"}


def test_the_gate_forwards_every_method_of_a_session() -> None:
    assert {name for name in vars(ToolSession) if not name.startswith("_")} <= set(vars(GatedSession))
