"""The findings of `vllm-gptoss doctor`, for the web page."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

LIMIT_S = 300.0
PROGRAM = (
    "import os; from vllm_gptoss.tools.sandbox import linux; linux.die_with_parent(9); os.nice(19);"
    " from vllm_gptoss.cli.main import app; app(['doctor', '--json'])"
)


class Doctor:
    """Runs doctor at most once, in a process of the lowest priority. `findings` is None until the process has ended."""

    def __init__(self) -> None:
        self.findings: list[dict[str, Any]] | None = None
        self._thread = threading.Thread(target=self._run, name="gptoss doctor", daemon=True)

    def start(self) -> None:
        """Starts the process, unless it was started before."""
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        command = [sys.executable, "-P", "-c", PROGRAM]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S)
            self.findings = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            fix = "run vllm-gptoss doctor"
            self.findings = [{"status": "problem", "check": "doctor", "detail": f"no findings: {error}", "fix": fix}]
