"""Which paths of the host a kernel needs to see: the system's libraries and one Python, nothing secret."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path

from vllm_gptoss.tools.sandbox.launcher import SandboxError
from vllm_gptoss.tools.sandbox.spec import View

from .options import PythonOptions

_SYSTEM = (
    *("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32"),
    *("/usr/libexec", "/usr/share/fonts", "/usr/share/zoneinfo"),
)
# Not the prefix itself: a virtual environment may lie in a project's folder, and conda's holds much else.
_OF_PREFIX = ("bin", "lib", "lib64", "pyvenv.cfg")
# Where installers put packages; a `.pth` file may name such a folder of another environment, and Debian's Python has
# one below /usr/local. What else a `.pth` names, such as a checkout that is installed editable, is not shown.
_PACKAGES = ("site-packages", "dist-packages")
# ipykernel requires debugpy, and IPython requires jedi, which requires parso: 55 MB that no kernel here imports.
_QUESTION = """
import importlib.util, json, sys
found = importlib.util.find_spec("ipykernel")
unused = [spec.origin for name in ("debugpy", "jedi", "parso") if (spec := importlib.util.find_spec(name))]
print(json.dumps([[sys.prefix, sys.base_prefix], sys.path, found and found.origin, unused]))
"""
_ANSWER_S = 20.0


async def build_view(options: PythonOptions) -> View:
    """The view for `options`. Raises SandboxError: the interpreter does not run, a path is missing, or the interpreter
    has its packages where no program would see them."""
    prefixes, path, kernel, unused = await _ask(options.python)
    shown = [*_SYSTEM, *(f"{prefix}/{part}" for prefix in prefixes for part in _OF_PREFIX)]
    shown += [folder for folder in path if Path(folder).name in _PACKAGES]
    for given in options.read_only_paths:
        if not given.exists():
            raise SandboxError(f"read_only_paths: {given} does not exist")
        shown.append(str(given.absolute()))
    if kernel is not None:
        _check_shown(Path(kernel).parents[1], shown, options.python)
    return View(
        read_only=tuple(dict.fromkeys(shown)),
        hidden=(*(str(p.absolute()) for p in options.hidden_paths), *(str(Path(file).parent) for file in unused)),
        allow_network=options.allow_network,
        uid=options.run_as_uid,
        gid=options.run_as_gid,
    )


def _check_shown(packages: Path, shown: Iterable[str], python: Path) -> None:
    """Without them a kernel's first import would fail with an unclear error."""
    where = packages.resolve()
    if not any(where.is_relative_to(Path(folder).resolve()) for folder in shown):
        raise SandboxError(
            f"{python} has its packages in {packages}, which programs are not shown: "
            f"name the folder {' or '.join(_PACKAGES)}, or set read_only_paths to it"
        )


async def _ask(python: Path) -> tuple[list[str], list[str], str | None, list[str]]:
    """The interpreter's prefixes, its `sys.path`, and the files of ipykernel and of packages that no kernel imports."""
    try:
        process = await asyncio.create_subprocess_exec(
            str(python), "-I", "-c", _QUESTION, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
        )
        async with asyncio.timeout(_ANSWER_S):
            answer, _ = await process.communicate()
        prefixes, path, kernel, unused = json.loads(answer)
    except (OSError, ValueError, TimeoutError) as error:
        raise SandboxError(f"cannot run the interpreter {python}: {error}") from error
    return prefixes, path, kernel, unused
