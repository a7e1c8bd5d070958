"""openai's tool servers, started as in the guide, serve our `--tool-server host:port,…`.

They need mcp 1.x and Python 3.12: `GPTOSS_OPENAI_SERVERS` names the folder `gpt-oss-mcp-server` of a clone in which the
first two lines of the guide's block were run. `uv` fetches a Python for the python server's first call.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SERVERS = os.environ.get("GPTOSS_OPENAI_SERVERS", "")
GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "guide.md").read_text()
pytestmark = pytest.mark.skipif(not SERVERS, reason="GPTOSS_OPENAI_SERVERS names no folder; see docs/guide.md#tools")


@contextmanager
def started(line: str) -> Iterator[None]:
    """The server that a line of the guide starts, once it listens, on a port that it chooses."""
    process = subprocess.Popen(["bash", "-c", f"exec env {line}"], cwd=SERVERS, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    for word in process.stderr:
        said.append(word)
        if "Uvicorn running" in word:
            break
    else:
        pytest.fail("".join(said))
    try:
        yield
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_both_servers_answer_as_the_guide_starts_them() -> None:
    (python,) = (line for line in GUIDE.splitlines() if line.endswith("mcp run -t sse python_server.py:mcp"))
    browser = python.replace("python_server", "browser_server").replace("PATH=", "EXA_API_KEY=none PATH=")
    with started(python), started(browser):
        command = [sys.executable, "-m", "vllm_gptoss.cli", "tools", "check", "localhost:8001,localhost:8000"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "200"}
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "search, open, find" in done.stdout
    assert done.stdout.count(" ok ") == 2
