"""`python -m demo.supervise COMMAND…`: runs COMMAND until standard input ends, then ends its whole process group.

Standard input is a pipe that only the process that started this one holds open, so it ends with that process, however
that one ends. This process has a new session, so it does not receive the signal of a closing terminal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PATIENCE_S = 15.0
"""Between SIGTERM and SIGKILL; less than `demo.server.stop` waits for this process."""


def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """A `subprocess.Popen` of `command` that does not outlive the calling process. Its `stdin` stays open."""
    return subprocess.Popen([sys.executable, "-m", "demo.supervise", *command], **{**options, "stdin": subprocess.PIPE})


def main(command: Sequence[str]) -> int:
    ended, write = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(write, b"."))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    child = os.pidfd_open(process.pid)
    select.select([sys.stdin, ended, child], [], [])
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait() & 0xFF


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
