"""`--help` does not import the packages of the commands, and doctor's lines stay whole in a pipe."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vllm_gptoss.cli import doctor, main


def test_help_imports_neither_torch_nor_vllm_nor_what_commands_need() -> None:
    code = "import sys; from vllm_gptoss.cli.main import app\ntry: app(['--help'])\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    text, modules = done.stdout.rsplit("\n", 2)[0], set(done.stdout.split())
    assert all(name in text for name in ("doctor", "tools", "bench", "recipe", "eval")), done.stderr
    assert not modules & {"torch", "vllm", "pydantic", "yaml", "httpx", "mcp", "numpy"}


def test_doctor_breaks_no_line_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(doctor, "examine", lambda *_: [doctor.Finding(doctor.Status.OK, "long", "word " * 40)])
    assert "word " * 39 in CliRunner().invoke(main.app, ["doctor"]).output
