"""Compares the installed vLLM with the definitions on which each part of the plugin relies.

`digests/` has a file for each vLLM release on which the suite has passed, written by `scripts/vllm_digests.py`. By part
and source file it lists a digest of the whole file and, for each definition, one of three requirements:

- a digest: the definition must be equal, because the plugin mirrors, overrides or replaces it;
- parameters, as `(request, timeout)`: the definition must exist and have them, because the plugin only calls it;
- code, as `~ state.chat = ~ start(`: the definition must contain these fragments in this order.

A file with an equal digest is not parsed, so the check of a tested release takes milliseconds. In other files,
comments, docstrings, layout and unlisted definitions may differ.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import re
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


PARTS: Mapping[str, str] = {
    "engine": "model, attention and experts",
    "runner": "worker and scheduler",
    "parser": "Harmony parser and chat completions",
    "endpoint": "Responses API and tools",
    "streams": "streaming",
}
"""The parts of the plugin that a release can disable, and what the log calls them."""


def why_off(part: str) -> str | None:
    """The reason to leave `part` to vLLM, or None.

    `runner` and `streams` are compared on every release, because a patch release may change what they mirror. The other
    parts are compared only on a release that is newer than the tested range.
    """
    if part in ("runner", "streams") or _vllm.is_untested(_vllm.version()):
        return why_not(part)
    return None


def summary() -> str:
    """The active parts and the disabled ones with their reasons, for a release outside the tested range."""
    reasons = {part: why_off(part) for part in PARTS}
    active = ", ".join(name for part, name in PARTS.items() if reasons[part] is None) or "none"
    off = "; ".join(f"{PARTS[part]} ({why})" for part, why in reasons.items() if why) or "none"
    return (
        f"vLLM {_vllm.version()} is outside the tested range {_vllm.RANGE}. Active parts: {active}."
        f" Parts that use vLLM's own implementation: {off}."
    )


@functools.cache
def why_not(part: str) -> str | None:
    """Names the first differences between the installed vLLM and the nearest tested release; None for a tested vLLM.

    part: a key of `PARTS`.
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
            have = VllmSource(source)
        except (SyntaxError, ValueError):
            yield file
            continue
        for name, expected in listed.items():
            if name != WHOLE and not have.meets(name, expected):
                yield f"{file.removesuffix('.py').replace('/', '.')}:{name}"


def digest(content: bytes) -> str:
    """The first 64 bits of SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()[:16]


class VllmSource:
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

    def meets(self, name: str, expected: str) -> bool:
        """Whether a definition meets a listed requirement."""
        if expected.startswith("~"):
            pattern = ".*".join(map(re.escape, expected.strip("~ ").split(" ~ ")))
            return any(re.search(pattern, ast.unparse(node), re.DOTALL) for node in self.nodes.get(name, ()))
        if not expected.startswith("("):
            return self.digest(name) == expected
        wanted = {each for each in expected.strip("()").split(", ") if each}
        if name in self.nodes:
            return any(wanted <= parameters(node) for node in self.nodes[name])
        return not wanted and (name in self.imports or "*" in self.imports)

    def digest(self, name: str) -> str | None:
        """Digest of a definition and of the imports of the names in it; None for an unknown name.

        The digest of a class covers bases, decorators, attributes and method names; methods have their own digests.
        """
        nodes = [_outline(node) for node in self.nodes.get(name, ())]
        used = {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}
        imports = sorted((each, self.imports[each]) for each in used & self.imports.keys())
        return digest(ascii((_form(nodes), imports)).encode()) if nodes else None


def parameters(node: ast.stmt) -> set[str]:
    """Names of the parameters of a function; of a class, of its `__init__`, or else its annotated fields."""
    if isinstance(node, ast.ClassDef):
        made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        if not made:
            return {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
        node = made[0]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    return {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)} - {"self", "cls"}


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
