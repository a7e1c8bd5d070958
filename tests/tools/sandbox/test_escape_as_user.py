"""The escape suite once more, by an ordinary user: other privileges to give away, the same walls."""

from __future__ import annotations

import os
import re
import sys
import tempfile

import pytest

from tests.tools.sandbox import as_nobody
from vllm_gptoss.tools.sandbox import bubblewrap

SUITES = ("test_escape.py", "test_escape_limits.py")
"""test_escape_messages.py is about the protocol, for which privileges do not matter."""


def without_bubblewrap() -> str | None:
    if bubblewrap.find() is None:
        return "bubblewrap is not installed"
    scratch = tuple(f"{path}/" for path in (bubblewrap.TMP, bubblewrap.DATA, bubblewrap.SHM, bubblewrap.RUN))
    for prefix in (sys.prefix, sys.base_prefix):
        if os.path.realpath(prefix).startswith(scratch):
            return f"{prefix} lies where bubblewrap's cage has its scratch space"
    return None


@pytest.mark.namespaces
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user; test_escape ran as an ordinary one")
@pytest.mark.parametrize("launcher", ["namespaces", "bubblewrap"])
def test_nothing_escapes_from_an_ordinary_users_server(launcher: str) -> None:
    if launcher == "bubblewrap" and (why := without_bubblewrap()):
        pytest.skip(why)
    with tempfile.TemporaryDirectory() as base:  # pytest's own is closed to others
        os.chown(base, as_nobody.NOBODY, as_nobody.NOBODY)
        done = as_nobody.run(SUITES, base, {"GPTOSS_TEST_LAUNCHER": launcher})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout
