"""Reads vLLM's source without importing it, so that one machine can check releases it cannot run."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNPACKED = ROOT / ".cache" / "vllm-0.33.0"


@dataclass(frozen=True)
class Release:
    """One vLLM source tree: `root` holds the package folder `vllm`."""

    version: str
    root: Path

    def module(self, name: str) -> Path | None:
        """The file of a dotted module name, or None."""
        path = self.root.joinpath(*name.split("."))
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
        return path / "__init__.py" if (path / "__init__.py").is_file() else None


def releases() -> list[Release]:
    """The installed vLLM, the unpacked CUDA release, and the folders in `GPTOSS_CONTRACT_TREES`, where they exist."""
    found = []
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:
        found.append(Release("installed", Path(spec.origin).parent.parent))
    if UNPACKED.is_dir():
        found.append(Release("0.33.0", UNPACKED))
    more = [Path(folder) for folder in os.environ.get("GPTOSS_CONTRACT_TREES", "").split(os.pathsep) if folder]
    return [*found, *(Release(folder.name, folder) for folder in more if folder != UNPACKED)]


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def top_level(path: Path) -> dict[str, ast.stmt]:
    """Names that a module defines or imports at its top level, also inside `if` and `try`, and what binds them."""
    names: dict[str, ast.stmt] = {}
    stack: list[ast.stmt] = list(tree(path).body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update({alias.asname or alias.name.split(".")[0]: node for alias in node.names})
        elif isinstance(node, ast.Assign):
            names.update({t.id: node for t in node.targets if isinstance(t, ast.Name)})
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            stack += node.body
            stack += getattr(node, "orelse", [])
            stack += getattr(node, "finalbody", [])
            for handler in getattr(node, "handlers", []):
                stack += handler.body
    return names


def has_name(release: Release, module: str, name: str) -> bool:
    """Whether `from module import name` finds an attribute, a submodule, or may through a module's `__getattr__`."""
    path = release.module(module)
    if path is None:
        return False
    names = top_level(path)
    return name in names or "__getattr__" in names or release.module(f"{module}.{name}") is not None or "*" in names


def find(release: Release, module: str, qualname: str) -> ast.stmt | None:
    """The class, function, method or class attribute named `qualname` in `module`, following re-exports."""
    path = release.module(module)
    if path is None:
        return None
    first, _, rest = qualname.partition(".")
    node = top_level(path).get(first)
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        origin = node.module if not node.level else ".".join([*_package(release, path, node.level), node.module])
        original = next(a.name for a in node.names if (a.asname or a.name) == first)
        return find(release, origin, ".".join([original, rest]) if rest else original)
    if not rest or node is None:
        return node
    return _member(release, module, node, rest)


def _member(release: Release, module: str, node: ast.stmt, name: str) -> ast.stmt | None:
    if not isinstance(node, ast.ClassDef):
        return None
    for member in node.body:
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and member.name == name:
            return member
        targets = member.targets if isinstance(member, ast.Assign) else [getattr(member, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return member
    for base in node.bases:  # an inherited member counts
        if isinstance(base, ast.Name) and (found := find(release, module, f"{base.id}.{name}")) is not None:
            return found
    return None


def _package(release: Release, path: Path, level: int) -> list[str]:
    parts = list(path.relative_to(release.root).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
        level -= 1
    return parts[: len(parts) - level] if level else parts


def parameters(node: ast.stmt) -> list[str]:
    """Parameter names of a function, or of a class's `__init__` or dataclass fields."""
    if isinstance(node, ast.ClassDef):
        init = next((m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None)
        if init is None:
            return [m.target.id for m in node.body if isinstance(m, ast.AnnAssign) and isinstance(m.target, ast.Name)]
        node = init
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    arguments = node.args
    return [
        a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if a.arg not in ("self", "cls")
    ]
