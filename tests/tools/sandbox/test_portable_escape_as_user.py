"""The portable tier's escape suite once more, by an ordinary user: nothing to give away, the same walls."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.tools.sandbox import as_nobody
from vllm_gptoss.tools.sandbox import interpreter


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user; the suite ran as an ordinary one")
def test_nothing_escapes_from_an_ordinary_users_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTOSS_CACHE", os.environ.get("GPTOSS_CACHE", str(as_nobody.ROOT / ".cache")))
    cache = asyncio.run(interpreter.Runtime.prepare()).module.parent
    with tempfile.TemporaryDirectory() as base:  # pytest's own is closed to others
        own = Path(base, "portable", cache.name)
        shutil.copytree(cache, own)  # another user's machine code would be refused
        for path in [Path(base), *Path(base).rglob("*")]:
            os.chown(path, as_nobody.NOBODY, as_nobody.NOBODY)
        done = as_nobody.run(["test_portable_escape.py"], base, {"GPTOSS_CACHE": base})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout
