"""Claude Code as a user runs it, with nothing but this server to talk to."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.responses import npm

PACKAGES = npm.PACKAGES / "@anthropic-ai"
# The package's own `claude` is put in place by an install script, and none are run here.
CLAUDE = next((path for path in sorted(PACKAGES.glob("claude-code-*/claude*")) if path.stem == "claude"), None)
needs_claude = pytest.mark.skipif(
    npm.missing(node=False) is not None or CLAUDE is None,
    reason="no Claude Code: scripts/environment.py installs it with the npm clients, where there is node",
)


def run_claude(url: str, model: str, folder: Path) -> str:
    """Claude Code does its task in `folder`/work, with a separate home; returns its last message."""
    home, work = folder / "home", folder / "work"
    for place in (folder, home, work):
        place.mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "x",
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_SMALL_FAST_MODEL": model,
        "MAX_THINKING_TOKENS": "1024",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1200",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",  # else it refuses to run as root without asking
    }
    task = "Write hello into hello.txt, make it goodbye, and copy the file to copy.txt."
    command = [str(CLAUDE), "-p", task, "--dangerously-skip-permissions", "--output-format", "json"]
    ran = subprocess.run(
        command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    result = json.loads(ran.stdout)
    assert not result["is_error"], result
    assert not result["permission_denials"], result
    return str(result["result"])
