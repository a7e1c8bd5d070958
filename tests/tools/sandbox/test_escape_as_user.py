"""The escape suite once more, by an ordinary user: other privileges to give away, the same walls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vllm_gptoss.tools.sandbox import bubblewrap

HERE = Path(__file__).parent
NOBODY = 65534


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user; test_escape ran as an ordinary one")
@pytest.mark.parametrize("launcher", ["namespaces", "bubblewrap"])
def test_nothing_escapes_from_an_ordinary_users_server(launcher: str) -> None:
    if launcher == "bubblewrap" and bubblewrap.find() is None:
        pytest.skip("bubblewrap is not installed")
    with tempfile.TemporaryDirectory() as base:  # pytest's own is closed to others
        os.chown(base, NOBODY, NOBODY)
        done = run_suite(base, launcher)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout


def run_suite(base: str, launcher: str) -> subprocess.CompletedProcess[str]:
    suite = str(HERE / "test_escape.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={base}/t", suite]
    return subprocess.run(
        [sys.executable, "-m", "tests.tools.sandbox.as_nobody", str(NOBODY), *command],
        cwd=HERE.parents[2],
        env={
            "PATH": os.environ["PATH"],
            "HOME": base,
            "PYTHONDONTWRITEBYTECODE": "1",
            "GPTOSS_TEST_LAUNCHER": launcher,
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
