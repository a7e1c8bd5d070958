"""vLLM's agentic-api, a gateway with its own Responses API, in front of a real `vllm serve` with the plugin."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.server import NAME, Server
from tests.support.places import CACHE
from tests.support.responses.frameworks import HOW
from tests.support.sockets import listening
from tests.support.waiting import soon

pytestmark = [pytest.mark.vllm, pytest.mark.serve]

HOME = CACHE / "clients-py" / "agentic_api"
FRANCE = "What is the capital of France?"


@pytest.fixture(scope="module")
def gateway(served: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    if not (HOME / "digest").exists():
        pytest.skip(f"no agentic-api: {HOW}")
    with listening() as free:
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("gateway")
    line = ["serve", "--vllm-base-url", served.url, "--host", "127.0.0.1", "--port", str(port)]
    environ = {**os.environ, "OPENAI_API_KEY": "alice", "HOME": str(folder)}
    command = [str(HOME / "bin" / "python"), "-m", "agentic_api", *line]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=120) as http:
            soon(lambda: process.poll() is not None or answers(http))
            assert process.poll() is None, Path(log.name).read_text()
            yield http
    finally:
        process.terminate()
        process.wait(30)


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/models").status_code == 200
    except httpx.TransportError:
        return False


def ask(http: httpx.Client, text: str, **fields: Any) -> httpx.Response:
    return http.post("/responses", json={"model": NAME, "input": text, "temperature": 0, **fields})


def texts(response: dict[str, Any]) -> list[str]:
    return [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]


def test_a_conversation_goes_through_the_gateway(gateway: httpx.Client) -> None:
    """The gateway stores the conversation and sends all of it: reasoning and answers of the plugin return as input."""
    first = ask(gateway, FRANCE).raise_for_status().json()
    assert texts(first) == ["The capital of France is Paris."]
    assert first["output"][0]["type"] == "reasoning"
    second = ask(gateway, "And of Germany?", previous_response_id=first["id"]).raise_for_status().json()
    assert texts(second) == ["The capital of Germany is Berlin."]


def test_a_stream_goes_through_the_gateway(gateway: httpx.Client) -> None:
    lines = ask(gateway, FRANCE, stream=True).raise_for_status().text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    parts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(parts) == "The capital of France is Paris."
    assert events[-1]["type"] == "response.completed"


def test_what_only_the_plugin_does(gateway: httpx.Client, served: Server) -> None:
    """The statements of docs/responses.md: its release refuses the python tool and answers `background` at once."""
    refused = ask(gateway, "Set x to 20 in Python, then double it.", tools=[PYTHON])
    assert (refused.status_code, "code_interpreter is disabled" in refused.text) == (400, True)
    at_once = ask(gateway, FRANCE, background=True).raise_for_status().json()
    assert at_once["status"] == "completed"
    with httpx.Client(base_url=served.api, headers={"Authorization": "Bearer alice"}, timeout=120) as http:
        assert ask(http, FRANCE, background=True).raise_for_status().json()["status"] == "queued"


PYTHON = {"type": "code_interpreter", "container": {"type": "auto"}}
