"""Codex CLI as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.responses import npm

CODEX = npm.PACKAGES / ".bin" / "codex"
needs_codex = pytest.mark.skipif(npm.missing() is not None, reason=str(npm.missing()))


def run_codex(url: str, model: str, folder: Path, *, websocket: bool) -> None:
    """Codex CLI writes a file in `folder`, with a separate home, through server-sent events or the WebSocket."""
    for place in (folder, folder / "home", folder / "work"):
        place.mkdir(exist_ok=True)
    supports = f"supports_websockets={'true' if websocket else 'false'}"
    provider = f'model_providers.gptoss={{name="gptoss",base_url="{url}/v1",wire_api="responses",{supports}}}'
    command = [CODEX, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command += ["-c", provider, "-c", "model_provider=gptoss", "-m", model, "Write hello into hello.txt"]
    environment = {**os.environ, "CODEX_HOME": str(folder / "home"), "RUST_LOG": "codex_otel=info"}
    ran = subprocess.run(
        command,
        cwd=folder / "work",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert (folder / "work" / "hello.txt").read_text() == "hello\n"
    assert "I wrote hello." in ran.stdout
    used = set(re.findall(r'event.name="codex\.(websocket_request|api_request)"', ran.stderr))
    assert used == {"websocket_request" if websocket else "api_request"}, used
