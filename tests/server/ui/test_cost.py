"""The page costs nothing where it is off, and nothing per token where it is on."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

import httpx
import pytest

from tests.support.responses.replay import ReplayEngine
from tests.support.responses.server import MODEL, Script, running
from tests.support.responses.turns import HELLO
from vllm_gptoss.server.responses.options import ResponsesOptions

LOADED = """
import sys
from fastapi import FastAPI
from vllm_gptoss.server.responses.endpoint import ResponsesEndpoint
from vllm_gptoss.server.responses.options import ResponsesOptions
ResponsesEndpoint(ResponsesOptions(ui={})).attach_router(FastAPI())
print(*(name for name in sys.modules if name.startswith("vllm_gptoss.server.ui")))
"""


@pytest.mark.parametrize("is_on", [False, True])
def test_its_modules_are_imported_only_where_it_is_on(is_on: bool) -> None:
    command = [sys.executable, "-c", LOADED.format(is_on)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert bool(done.stdout.split()) is is_on


def test_no_function_of_the_page_runs_while_a_response_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event == "call":
            called.add(frame.f_code.co_filename.rpartition("/vllm_gptoss/")[2])

    monkeypatch.setattr(threading, "_profile_hook", note)  # `threading.setprofile`, undone after the test
    options = ResponsesOptions(store=str(tmp_path / "store.sqlite"), ui=True)
    with running(ReplayEngine(Script(HELLO), chunk=1), options) as server:
        called.clear()
        with server.http() as http:
            assert (
                "response.completed"
                in http.post("/responses", json={"model": MODEL, "input": "hi", "stream": True}).text
            )
        streamed = set(called)
        httpx.get(f"{server.url}/ui/").raise_for_status()
    assert "server/responses/run/loop.py" in streamed
    page = {"server/ui/pages.py", "server/ui/doctor.py", "server/responses/transport/server_route.py"}
    assert not page & streamed
    assert page & called
