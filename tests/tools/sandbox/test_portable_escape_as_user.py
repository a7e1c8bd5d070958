"""The portable tier's escape suite once more, by an ordinary user: nothing to give away, the same walls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vllm_gptoss.tools.sandbox import interpreter

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
NOBODY = 65534


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user; the suite ran as an ordinary one")
def test_nothing_escapes_from_an_ordinary_users_server(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Path(os.environ.get("GPTOSS_CACHE", ROOT / ".cache")) / "portable" / interpreter._key()
    assert cache.is_dir(), "test_portable_escape comes first and has compiled it"
    with tempfile.TemporaryDirectory() as base:  # pytest's own is closed to others
        own = Path(base, "portable", cache.name)
        shutil.copytree(cache, own)  # another user's machine code would be refused
        for path in [Path(base), *Path(base).rglob("*")]:
            os.chown(path, NOBODY, NOBODY)
        suite = str(HERE / "test_portable_escape.py")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={base}/t", suite]
        done = subprocess.run(
            [sys.executable, "-m", "tests.tools.sandbox.as_nobody", str(NOBODY), *command],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "HOME": base, "PYTHONDONTWRITEBYTECODE": "1", "GPTOSS_CACHE": base},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout
