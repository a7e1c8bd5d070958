#!/usr/bin/env python3
"""Unpacks the Python source of a vLLM CUDA release for the contract tests: `.cache/vllm-0.33.0/vllm/**/*.py`.

The wheel (336 MB) is not installed: its kernels need CUDA, its source does not. Done once; an interrupted download
starts over, an unpacked tree appears only when it is whole.
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


def main() -> int:
    target = CACHE / f"vllm-{VERSION}"
    if target.exists():
        return 0
    print(f"* downloading the source of vLLM {VERSION} (336 MB, once)", flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        wheels = Path(scratch) / "wheels"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--no-cache-dir",
        ]
        command += [
            "--platform",
            "manylinux_2_28_x86_64",
            "--python-version",
            "3.12",
            "-d",
            str(wheels),
            f"vllm=={VERSION}",
        ]
        if subprocess.run(command).returncode:
            print(f"vLLM {VERSION} could not be downloaded: its contract tests will be skipped", file=sys.stderr)
            return 0
        tree = Path(scratch) / "tree"
        with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
            wheel.extractall(tree, [name for name in wheel.namelist() if name.endswith((".py", "METADATA"))])
        shutil.move(tree, target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
