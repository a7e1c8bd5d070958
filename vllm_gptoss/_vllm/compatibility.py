"""Compares the installed vLLM with the functions that our runner, scheduler and streams mirror or rely on.

`digests/` has a file for each vLLM release on which the suite has passed, written by `scripts/vllm_digests.py`. It
lists by part (`runner`, `streams`, and `replaced` for the contract tests) and by source file: a digest of the whole
file, and a digest of each function, class and constant. A file with an equal digest is not parsed, so the check takes
milliseconds. In other files, comments, docstrings, layout and unlisted definitions may differ.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_gptoss import _vllm

FOLDER = Path(__file__).with_name("digests")
WHOLE = "*"
"""The key of a whole file's digest."""
NAMED = 3
"""Most changed functions that one log line names."""

Files = Mapping[str, Mapping[str, str]]
"""By path below the folder of `vllm`, digests by qualified name."""


@functools.cache
def releases() -> Mapping[str, Mapping[str, Files]]:
    """The listed digests by release, part and file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


@functools.cache
def why_not(part: str) -> str | None:
    """Names the first differences between the installed vLLM and the nearest tested release; None for a tested vLLM.

    part: `runner` or `streams`.
    """
    spec, version = importlib.util.find_spec("vllm"), _vllm.version() or ""
    if spec is None or spec.origin is None:
        return "vLLM is not installed"
    root, found = Path(spec.origin).parents[1], {}
    for release in sorted(releases(), key=lambda release: (version.startswith(release), release), reverse=True):
        if part in releases()[release]:
            found[release] = list(islice(changed(releases()[release][part], root), NAMED))
            if not found[release]:
                return None
    nearest = min(found, key=lambda release: len(found[release]))
    return f"vLLM {version} differs from {nearest} in {', '.join(found[nearest])}"


def changed(files: Files, root: Path) -> Iterator[str]:
    """Yields `module:name` of each listed definition that differs below `root`; the path of an unreadable file.

    root: the folder that contains the package `vllm`.
    """
    for file, listed in files.items():
        try:
            source = (root / file).read_bytes()
        except OSError:
            yield file
            continue
        if digest(source) == listed[WHOLE]:
            continue
        try:
            have = Source(source)
        except (SyntaxError, ValueError):
            yield file
            continue
        for name, expected in listed.items():
            if name != WHOLE and have.digest(name) != expected:
                yield f"{file.removesuffix('.py').replace('/', '.')}:{name}"


def digest(content: bytes) -> str:
    """The first 64 bits of SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()[:16]


class Source:
    """The definitions of a module by qualified name, including those under `if` and `try`."""

    def __init__(self, content: bytes) -> None:
        self.nodes: dict[str, list[ast.stmt]] = {}
        self.imports: dict[str, str] = {}
        self._collect(ast.parse(content).body, "")

    def _collect(self, body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.nodes.setdefault(prefix + node.name, []).append(node)
                if isinstance(node, ast.ClassDef):
                    self._collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self.nodes.setdefault(prefix + ast.unparse(target), []).append(node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                self.imports |= {alias.asname or alias.name: origin + alias.name for alias in node.names}
            else:
                for inner in (node, *getattr(node, "handlers", ())):
                    for field in ("body", "orelse", "finalbody"):
                        self._collect(getattr(inner, field, []), prefix)

    def digest(self, name: str) -> str | None:
        """Digest of a definition and of the imports of the names in it; None for an unknown name.

        The digest of a class covers bases, decorators, attributes and method names; methods have their own digests.
        """
        nodes = [_outline(node) for node in self.nodes.get(name, ())]
        used = {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}
        imports = sorted((each, self.imports[each]) for each in used & self.imports.keys())
        return digest(ascii((_form(nodes), imports)).encode()) if nodes else None


def _outline(node: ast.stmt) -> ast.stmt:
    if not isinstance(node, ast.ClassDef):
        return node
    body = [ast.Expr(ast.Name(each.name)) if hasattr(each, "name") else each for each in node.body]
    return ast.ClassDef(node.name, node.bases, node.keywords, body, node.decorator_list)


def _form(value: Any) -> Any:
    """A syntax tree without positions and docstrings, equal for Python 3.11 to 3.13."""
    if isinstance(value, list):
        return [_form(each) for each in value if not _is_text(each)]
    if not isinstance(value, ast.AST):
        return value
    fields = ((name, each) for name, each in ast.iter_fields(value) if name not in ("ctx", "kind", "type_comment"))
    return type(value).__name__, [(name, _form(each)) for name, each in fields if each is not None and each != []]


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
