"""MCP on the real server and model: real servers over each transport, answering, refusing, killed in the middle."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest

from demo.server import NAME, Server
from tests.e2e.asking import ONE_WAY, PYTHON, SEARCH, Asker, calls, logs, mcp, metric, said
from tests.support.mcp_servers import McpServers

pytestmark = [pytest.mark.vllm, pytest.mark.serve, pytest.mark.timeout(600)]

KNOWN = {
    "streamable_http": (
        "Will it rain in Lisbon tomorrow?",
        "weather.get_forecast",
        {"city": "Lisbon", "days": 1},
        "No rain in Lisbon for 1 day.",
        "No rain is expected in Lisbon tomorrow.",
    ),
    "stdio": ("Use the calculator server to add 2 and 3.", "calc.add", {"a": 2, "b": 3}, "5", "The calculator says 5."),
    "sse": (
        "Make the echo server repeat hello.",
        "echo.repeat",
        {"text": "hello"},
        "hello",
        "The echo server said hello.",
    ),
}
"""By transport: a question, the call that the model makes, what the server answers, and what the model makes of it."""


@pytest.mark.parametrize("transport", KNOWN)
def test_the_model_calls_a_server_over(ask: Asker, transport: str) -> None:
    question, called, arguments, output, answer = KNOWN[transport]
    label, name = called.split(".")
    response = ask(question, mcp(label))
    listed, reasoning, call, *_ = response["output"]
    assert (listed["type"], listed["server_label"], reasoning["type"]) == ("mcp_list_tools", label, "reasoning")
    assert name in [tool["name"] for tool in listed["tools"]]
    assert "delete_file" not in [tool["name"] for tool in listed["tools"]], "tools.yaml does not allow it"
    assert (call["type"], call["server_label"], call["name"]) == ("mcp_call", label, name)
    assert json.loads(call["arguments"]) == arguments
    assert (call["status"], call["output"], call["error"]) == ("completed", output, None)
    assert said(response) == answer
    again = ask(question, mcp(label), previous_response_id=response["id"])
    assert "mcp_list_tools" not in [item["type"] for item in again["output"]], "the chain has its list already"
    if ask.streamed:
        steps = [event["type"].removeprefix("response.mcp_call") for event in ask.events]
        steps = [step for step in steps if step.startswith((".", "_arguments.done"))]
        assert steps == [".in_progress", "_arguments.done", ".completed"]


def test_a_tool_that_fails_fails_its_item_and_the_model_reads_why(ask: Asker) -> None:
    response = ask("Are there weather alerts in Texas?", mcp("weather"))
    (call,) = calls(response)
    assert (call["status"], call["output"]) == ("failed", None)
    (content,) = call["error"]["content"]
    assert "get_alerts" in content["text"]
    assert said(response) == "The weather server could not answer."


def test_an_image_comes_back_as_a_note_in_order(ask: Asker) -> None:
    (call,) = calls(ask("Ask the media server for a picture.", mcp("media")))
    assert call["output"] == "here it is\n[image, image/png]"


def test_two_servers_over_two_transports_in_one_response(ask: Asker) -> None:
    question = "Add 4 and 5 with the calculator and let the echo server repeat the sum."
    response = ask(question, mcp("calc"), mcp("echo"))
    assert [item["server_label"] for item in response["output"] if item["type"] == "mcp_list_tools"] == ["calc", "echo"]
    assert [(call["server_label"], call["output"]) for call in calls(response)] == [("calc", "9"), ("echo", "9")]
    assert said(response) == "The sum is 9, said the echo."


def test_a_call_that_needs_a_word_runs_after_it_was_given(ask: Asker) -> None:
    tool = mcp("files", require_approval="always")
    first = ask("Delete notes.txt.", tool)
    request = first["output"][-1]
    assert (request["type"], request["name"]) == ("mcp_approval_request", "delete_file")
    assert not calls(first)
    answer = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    second = ask([answer], tool, previous_response_id=first["id"])
    (call,) = calls(second)
    assert (call["output"], call["approval_request_id"]) == ("deleted notes.txt", request["id"])
    assert said(second) == "I asked the server to delete notes.txt."


def test_a_server_that_a_request_names_is_called_if_its_host_is_allowed(ask: Asker, mcp_servers: McpServers) -> None:
    question, called, _, output, answer = KNOWN["sse"]
    label = called.split(".")[0]
    port = mcp_servers.streamable_http.port
    allowed = mcp(label, server_url=f"http://127.0.0.1:{port}/mcp", require_approval="never")
    response = ask(question, allowed)
    assert [call["output"] for call in calls(response)] == [output]
    assert said(response) == answer
    other = mcp(label, server_url=f"http://localhost:{port}/mcp", require_approval="never")
    refused = ask.http.post("/responses", json={"model": NAME, "input": question, "tools": [other]})
    assert refused.status_code == 400
    assert "does not connect to localhost" in refused.json()["error"]["message"]


def test_a_server_that_is_down_costs_its_own_tool(ask: Asker, served: Server) -> None:
    body = {"model": NAME, "input": "Ask the clock server for the time.", "tools": [mcp("clock")]}
    refused = ask.http.post("/responses", json=body | {"stream": ask.streamed})
    assert refused.status_code == 400
    assert "the tool is off: ConnectError" in refused.json()["error"]["message"]
    assert "tool clock is off: ConnectError" in served.log.read_text()


@pytest.mark.parametrize(
    ("transport", "ask"), zip(KNOWN, (False, True, False), strict=True), ids=KNOWN, indirect=["ask"]
)
def test_a_server_killed_in_a_call_costs_that_call(
    ask: Asker, mcp_servers: McpServers, served: Server, transport: str
) -> None:
    """The response goes on to its answer, other tools work meanwhile, and the server's return is noticed."""
    question, called, _, output, answer = KNOWN[transport]
    label = called.split(".")[0]
    server = getattr(mcp_servers, transport)
    server.hold()
    killer = threading.Thread(target=server.kill_in_call)
    killer.start()
    response = ask(question, mcp(label))
    killer.join()
    (call,) = calls(response)
    assert (call["status"], call["output"]) == ("failed", None)
    assert "The call may have run" in call["error"]["content"][0]["text"]
    assert said(response) == answer, "the model continues; this one answers the same to any result"
    if ask.streamed:
        assert "response.mcp_call.failed" in [event["type"] for event in ask.events]
    (other,) = calls(ask("Compute 17 * 23 with Python.", PYTHON))
    assert logs(other).strip() == "391"
    server.start()
    assert until_back(ask.http, question, label) == output
    assert httpx.get(f"{served.url}/health", timeout=10).status_code == 200


def until_back(http: httpx.Client, question: str, label: str, patience: float = 60) -> str:
    """The output of the next call that works."""
    body = {"model": NAME, "input": question, "tools": [mcp(label)], "temperature": 0}
    began = time.monotonic()
    while time.monotonic() - began < patience:
        answer = http.post("/responses", json=body)
        done = answer.status_code == 200 and calls(answer.json())
        if done and done[0]["status"] == "completed":
            return str(done[0]["output"])
        time.sleep(0.2)
    raise AssertionError(f"{label} did not come back: {answer.text[:500]}")


QUESTIONS: list[tuple[str, dict[str, Any], str, str]] = [
    ("Compute 17 * 23 with Python.", PYTHON, "python", "ok"),
    ("Compute the square root of 1764.", PYTHON, "python", "error"),
    ("Search for the glass library.", SEARCH, "browser.search", "ok"),
    (KNOWN["streamable_http"][0], mcp("weather"), "weather.get_forecast", "ok"),
    ("Are there weather alerts in Texas?", mcp("weather"), "weather.get_alerts", "error"),
]


@ONE_WAY
@pytest.mark.parametrize(("question", "tool", "name", "outcome"), QUESTIONS)
def test_every_call_is_counted_and_logged_with_its_response(
    ask: Asker, served: Server, question: str, tool: dict[str, Any], name: str, outcome: str
) -> None:
    def sampled() -> list[float]:
        text = httpx.get(f"{served.url}/metrics", timeout=30).text
        labels = {"tool": name}
        return [
            metric(text, "gptoss_tool_calls_total", outcome=outcome, **labels),
            metric(text, "gptoss_tool_errors_total", type="tool_failed", **labels),
            metric(text, "gptoss_tool_call_seconds_bucket", le="+Inf", **labels),
            metric(text, "gptoss_tool_queue_seconds_count", **labels),
            metric(text, "gptoss_tool_calls_running", **labels) + metric(text, "gptoss_tool_calls_waiting", **labels),
        ]

    before = sampled()
    response = ask(question, tool)
    made = len(calls(response))
    failed = len([call for call in calls(response) if call["status"] == "failed"])
    grown = [after - was for was, after in zip(before, sampled(), strict=True)]
    wanted = failed if outcome == "error" else made - failed
    assert grown == [wanted, failed, made, made, 0]
    lines = [line for line in served.log.read_text().splitlines() if f"response_id={response['id']} " in line]
    assert [item["id"] in line for item, line in zip(calls(response), lines, strict=True)] == [True] * made
    assert all(f"tool={name} " in line and "seconds=" in line for line in lines)
    assert not any("(1764)" in line or "Lisbon" in line for line in lines), "arguments are the user's"
