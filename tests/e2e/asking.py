"""Requests to the small model on the real server, streamed or not, and checks of the answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from demo.server import NAME
from tests.support.responses.events import check_response, stream
from vllm_gptoss.server.harmony import messages as harmony
from vllm_gptoss.server.harmony.events import Channel
from vllm_gptoss.server.harmony.prompt import render_message

PYTHON = {"type": "code_interpreter", "container": {"type": "auto"}}
SEARCH = {"type": "web_search"}
ONE_WAY = pytest.mark.parametrize("ask", [False], ids=["whole"], indirect=True)
"""For a test of something that does not depend on streaming."""
INCLUDE = ["code_interpreter_call.outputs", "web_search_call.action.sources"]


def mcp(label: str, **fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": label, **fields}


@dataclass
class Asker:
    """One way of asking: `events` holds the last answer's stream, empty where it was not streamed."""

    http: httpx.Client
    streamed: bool
    events: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, question: Any, *tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """The completed response, checked strictly against openai's types."""
        body = {"model": NAME, "input": question, "tools": tools, "include": INCLUDE, "temperature": 0, **fields}
        if self.streamed:
            self.events = stream(self.http, body)
            response: dict[str, Any] = self.events[-1]["response"]
        else:
            answer = self.http.post("/responses", json=body)
            assert answer.status_code == 200, answer.text
            response = answer.json()
        check_response(response)
        assert response["status"] == "completed", response
        return response

    def prompt_tokens(self, question: str, *tools: dict[str, Any]) -> int:
        """The length of the first prompt of this question."""
        body = {"model": NAME, "input": question, "tools": tools}
        return int(self.http.post("/responses/input_tokens", json=body).raise_for_status().json()["input_tokens"])


def said(response: dict[str, Any]) -> str:
    return check_response(response).output_text


def calls(response: dict[str, Any]) -> list[dict[str, Any]]:
    """Items of the tools that the server ran, in order."""
    return [item for item in response["output"] if item["type"].endswith("_call")]


def logs(call: dict[str, Any]) -> str:
    """All text of a python call's outputs, as the model reads it."""
    return "\n".join(output["logs"] for output in call["outputs"] if output["type"] == "logs")


def tokens_of_results(recipient: str, results: Sequence[str]) -> int:
    """Additional prompt tokens of these results of a built-in tool, including the next turns' headers."""
    told = [harmony.tool_result(recipient, text, channel=Channel.ANALYSIS) for text in results]
    return sum(len(render_message(message)) + len(("<|start|>", "assistant")) for message in told)


def metric(metrics: str, name: str, **labels: str) -> float:
    """The value of a sample in Prometheus text; 0 if there is none."""
    for line in metrics.splitlines():
        match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if match and dict(re.findall(r'(\w+)="([^"]*)"', match[1] or "")) == labels:
            return float(match[2])
    return 0.0
