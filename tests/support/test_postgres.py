"""A test run that is killed leaves no PostgreSQL and no folder behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import soon

STARTS_ONE = """
from tests.support.responses.postgres import Postgres
server = Postgres()
print(server.process.pid, server.home, flush=True)
input()
"""


@pytest.mark.slow
def test_a_killed_run_takes_its_database_with_it() -> None:
    run = subprocess.Popen([sys.executable, "-c", STARTS_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with run:
        assert run.stdout
        pid, home = run.stdout.readline().split()
        assert psutil.pid_exists(int(pid))
        run.kill()
    soon(lambda: not Path(home).exists(), 60)
    soon(lambda: not psutil.pid_exists(int(pid)), 10)
