"""Reports what a vLLM release changes of what the plugin relies on: `make contract VLLM="0.34.0 …"`.

    python -m tests.contract.report [VERSION | WHEEL | URL | FOLDER]...

The installed vLLM is not imported and the release is not installed: both are read as source, which takes seconds.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.vllm_source import SourceError, unpacked
from tests.contract import overrides, package_imports, seams
from tests.contract.source import Release, releases
from vllm_gptoss._vllm import compatibility
from vllm_gptoss._vllm.compatibility import PARTS, WHOLE, VllmSource, parameters


@dataclass(frozen=True)
class Change:
    """One difference: the parts that it disables, a line, and the changed source as a unified diff."""

    parts: tuple[str, ...]
    line: str
    diff: str = ""


def changes(new: Release, old: Release) -> list[Change]:
    """All differences of `new` from the tested release `old` in what the plugin uses."""
    return [*_definitions(new, old), *_uses(new)]


def _definitions(new: Release, old: Release) -> Iterator[Change]:
    """By listed definition: it is missing, lost or gained parameters, or has another body."""
    listed = compatibility.releases()[old.version]
    needed: dict[tuple[str, str], dict[str, str]] = {}
    for part, files in listed.items():
        for file, names in files.items():
            for name, expected in names.items():
                if name != WHOLE:
                    needed.setdefault((file, name), {})[part] = expected
    sources: dict[str, tuple[VllmSource, VllmSource]] = {}
    for (file, name), by_part in needed.items():
        if file not in sources:
            sources[file] = _source(new, file), _source(old, file)
        now, before = sources[file]
        parts = tuple(part for part, expected in by_part.items() if not now.meets(name, expected))
        if change := _change(new, f"{file}:{name}", name, now, before, parts):
            yield change


@functools.cache
def _source(release: Release, file: str) -> VllmSource:
    path = release.root / file
    return VllmSource(path.read_bytes() if path.is_file() else b"")


def _change(
    new: Release, where: str, name: str, now: VllmSource, before: VllmSource, parts: tuple[str, ...]
) -> Change | None:
    if name not in now.nodes:
        return Change(parts, f"moved: {where}{_found_again(new, name)}") if parts else None
    had, has = _parameters(before, name), _parameters(now, name)
    told = [
        f"{word} {', '.join(sorted(names))}" for word, names in (("lost", had - has), ("gained", has - had)) if names
    ]
    if told:
        return Change(parts, f"parameters: {where} {' and '.join(told)}", _diff(name, before, now))
    return Change(parts, f"changed: {where}", _diff(name, before, now)) if parts else None


def _parameters(source: VllmSource, name: str) -> set[str]:
    return set().union(*(parameters(node) for node in source.nodes.get(name, ())))


def _found_again(release: Release, name: str) -> str:
    """Other files that define the last part of a missing name."""
    files = _definers(release.root).get(name.rpartition(".")[2])
    return f" (now perhaps in {', '.join(files[:3])})" if files else ""


@functools.cache
def _definers(root: Path) -> Mapping[str, list[str]]:
    """The files of a release that define a function, method or class, by its name."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "vllm").rglob("*.py")):
        for name in set(re.findall(r"^\s*(?:async def|def|class) (\w+)", path.read_text(), re.MULTILINE)):
            found.setdefault(name, []).append(str(path.relative_to(root)))
    return found


def _diff(name: str, before: VllmSource, now: VllmSource) -> str:
    texts = ["\n".join(ast.unparse(node) for node in source.nodes.get(name, ())) for source in (before, now)]
    lines = difflib.unified_diff(*(text.splitlines() for text in texts), "tested", "new", lineterm="", n=2)
    return "\n".join(f"    {line}" for line in lines)


def _uses(new: Release) -> Iterator[Change]:
    """Imports that fail, seams of which something is missing, and overrides that do not take a new parameter."""
    for file, line in (*package_imports.missing(new), *overrides.narrow(new)):
        yield Change(_parts_of(file), line)
    for seam in seams.SEAMS:
        if why := seams.problem(new, seam):
            yield Change((), why)


def _parts_of(file: str) -> tuple[str, ...]:
    folders = {"engine/runner": "runner", "engine": "engine", "server/chat": "parser", "server/responses": "endpoint"}
    return next(((part,) for folder, part in folders.items() if f"vllm_gptoss/{folder}" in file), ())


def print_report(new: Release, old: Release) -> bool:
    """Prints the report of one release; True if every part of the plugin is active with it."""
    found = changes(new, old)
    print(f"vLLM {new.version} compared with {old.version}: {len(found)} differences")
    for change in found:
        print(f"- [{', '.join(change.parts) or 'no part disabled'}] {change.line}\n{change.diff}".rstrip())
    affected = {part for change in found for part in change.parts}
    for part, name in PARTS.items():
        print(f"{name}: {'off, vLLM serves it' if part in affected else 'active'}")
    return not affected


def main(arguments: list[str]) -> int:
    tested = [release for release in releases() if release.version in compatibility.releases()]
    if not tested:
        print("no tested release is unpacked: run scripts/vllm_source.py", file=sys.stderr)
        return 2
    try:
        news = [Release(Path(folder).name, folder) for folder in map(unpacked, arguments)]
    except SourceError as error:
        print(error, file=sys.stderr)
        return 2
    fits = [print_report(new, tested[-1]) for new in news or tested]  # each is printed
    return int(not all(fits))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
