"""The description of the server for its page: no caller reads another one's tool errors."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.responses import fakes
from tests.support.responses.server import Start, create
from tests.support.responses.turns import HELLO, INTERPRETER, PYTHON
from tests.support.waiting import soon
from vllm_gptoss.server.ui import doctor
from vllm_gptoss.tools.protocol import ToolCall, ToolResult, failed


async def fail(call: ToolCall) -> ToolResult:
    return failed("timeout", f"It was too slow: {call.arguments} \ud800 " + "x" * 1000)


def test_a_key_reads_the_tool_errors_of_its_own_calls(start: Start) -> None:
    server = start(PYTHON, HELLO, providers=[fakes.python(fail)], config={"ui": True})
    with server.http("alice") as http:
        create(http, input="1?", tools=[INTERPRETER])
        (mine,) = http.get("/ui/server").json()["tool_errors"]
    assert (mine["tool"], mine["type"], len(mine["message"])) == ("python", "timeout", 500)
    assert mine["message"].startswith("It was too slow: print(1) ?")
    with server.http("bob") as http:
        assert http.get("/ui/server").json()["tool_errors"] == []
    assert httpx.get(f"{server.url}/v1/ui/server").json()["tool_errors"] == []


def test_doctor_runs_only_for_the_page_that_shows_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    monkeypatch.setattr(doctor, "PROGRAM", f"open({str(started)!r}, 'w'); print('[]')")
    server = start(HELLO, config={"ui": True})
    with server.http() as http:
        assert http.get("/ui/server").json()["doctor"] is None
        assert http.get("/ui/server?doctor").json()["doctor"] is None
        soon(lambda: http.get("/ui/server").json()["doctor"] == [])
    assert started.exists()
