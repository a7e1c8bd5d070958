"""The server starts doctor once, at low priority and with a time limit, and shows its failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import soon
from vllm_gptoss.server.ui import doctor
from vllm_gptoss.server.ui.doctor import Doctor

SERVER = "from vllm_gptoss.server.ui.doctor import Doctor; Doctor().start(); input()"


def test_it_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    program = f"open({str(runs)!r}, 'a').write('x'); print('[{{\"status\": \"ok\"}}]'); raise SystemExit(1)"
    monkeypatch.setattr(doctor, "PROGRAM", program)
    one = Doctor()
    assert one.findings is None
    for _ in range(3):
        one.start()
    soon(lambda: one.findings is not None)
    one.start()
    assert one.findings == [{"status": "ok"}]
    assert runs.read_text() == "x"


@pytest.mark.parametrize(
    ("program", "why"),
    [("raise ImportError", ""), ("print('no JSON')", ""), ("import time; time.sleep(600)", "after 0.5 seconds")],
)
def test_its_failure_is_a_finding(program: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROGRAM", program)
    monkeypatch.setattr(doctor, "LIMIT_S", 0.5 if why else 60.0)
    one = Doctor()
    one.start()
    soon(lambda: one.findings is not None)
    (finding,) = one.findings or ()
    assert (finding["status"], finding["fix"]) == ("problem", "run vllm-gptoss doctor")
    assert why in finding["detail"]


def test_it_has_the_lowest_priority_and_ends_with_a_killed_server() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE) as server:
        soon(lambda: [child.nice() for child in psutil.Process(server.pid).children()] == [19])
        (child,) = psutil.Process(server.pid).children()
        server.kill()
    soon(lambda: not child.is_running(), 5)
