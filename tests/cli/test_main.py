"""`--help` is fast: it does not import the packages of the commands."""

from __future__ import annotations

import subprocess
import sys


def test_help_imports_neither_torch_nor_vllm_nor_what_commands_need() -> None:
    code = "import sys; from vllm_gptoss.cli.main import app\ntry: app(['--help'])\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    text, modules = done.stdout.rsplit("\n", 2)[0], set(done.stdout.split())
    assert all(name in text for name in ("doctor", "tools", "bench", "recipe", "eval")), done.stderr
    assert not modules & {"torch", "vllm", "pydantic", "yaml", "httpx", "mcp", "numpy"}
