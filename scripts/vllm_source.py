#!/usr/bin/env python3
"""Unpacks the Python source of vLLM releases for the contract tests: `.cache/vllm-0.33.0/vllm/**/*.py`.

    python scripts/vllm_source.py [VERSION | WHEEL | URL | FOLDER]...      (default: 0.33.0)

VERSION comes from the package index. WHEEL is a file, URL a wheel that pip can download, and FOLDER an unpacked release
that contains the package `vllm`. A wheel is not installed: its kernels need CUDA, its source does not. Each is unpacked
once. An interrupted download starts over, because a tree is moved to its place when it is complete.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.33.0"
CACHE = Path(os.environ.get("GPTOSS_CACHE", Path(__file__).resolve().parent.parent / ".cache"))
DOWNLOAD = "-m pip download --quiet --no-deps --only-binary=:all: --no-cache-dir --python-version 3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_34_x86_64", "manylinux_2_35_x86_64")


class SourceError(Exception):
    """A release that cannot be found, downloaded or unpacked."""


def unpacked(release: str) -> Path:
    """The folder that contains the package `vllm` of `release`, downloaded and unpacked if necessary.

    Raises:
        SourceError: there is no such folder, or the wheel cannot be downloaded or read.
    """
    if (folder := Path(release)).is_dir():
        if not (folder / "vllm" / "__init__.py").is_file():
            raise SourceError(f"{release} contains no package vllm")
        return folder.resolve()
    is_wheel = release.partition("#")[0].endswith(".whl")
    version = release.rpartition("/")[2].split("-")[1] if is_wheel else release
    target = CACHE / f"vllm-{version.replace('%2B', '+')}"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            wheel = Path(release) if is_wheel and "://" not in release else _download(release, is_wheel, scratch)
            _extract(wheel, Path(scratch) / "tree", target)
    return target


def _download(release: str, is_wheel: bool, scratch: str) -> Path:
    print(f"* downloading the source of vLLM {release} (336 MB, once)", flush=True)
    wheels = Path(scratch) / "wheels"
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    wanted = release if is_wheel else f"vllm=={release}"
    if subprocess.run([sys.executable, *DOWNLOAD.split(), *platforms, "-d", str(wheels), wanted]).returncode:
        raise SourceError(f"vLLM {release} could not be downloaded")
    return next(wheels.glob("*.whl"))


def _extract(wheel: Path, tree: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tree, [name for name in archive.namelist() if name.endswith((".py", "METADATA"))])
    except (OSError, zipfile.BadZipFile) as error:
        raise SourceError(f"{wheel} cannot be unpacked: {error}") from error
    shutil.move(tree, target)


def main() -> int:
    try:
        for release in sys.argv[1:] or [VERSION]:
            unpacked(release)
    except SourceError as error:
        print(f"{error}: its contract tests will be skipped", file=sys.stderr)
        return int(bool(sys.argv[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
