"""The tool loop: which calls run, the order of their events, which never run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.responses import fakes
from tests.support.responses.events import kinds, stream
from tests.support.responses.server import MODEL, Start, create, harmony
from tests.support.responses.turns import CALL, CITED, HELLO, INTERPRETER, MCP, PYTHON, SEARCH, WEATHER
from vllm_gptoss.server.responses.run.loop import IGNORED_CALLS
from vllm_gptoss.tools.protocol import Text, ToolCall, ToolResult


def test_python_is_completed_only_after_it_ran_and_with_its_output(start: Start) -> None:
    events_seen: list[str] = []
    tool = fakes.python()
    server = start(PYTHON, HELLO, providers=[tool])
    with server.http() as http:
        body = {"model": MODEL, "input": "1?", "tools": [INTERPRETER], "include": ["code_interpreter_call.outputs"]}
        events = stream(http, body)
    events_seen = [name for name in kinds(events) if "code_interpreter" in name and not name.endswith("delta")]
    assert events_seen == [
        "code_interpreter_call.in_progress",
        "code_interpreter_call_code.done",
        "code_interpreter_call.interpreting",
        "code_interpreter_call.completed",
    ]
    item = events[-1]["response"]["output"][1]
    assert item["type"] == "code_interpreter_call"
    assert item["id"].startswith("ci_")
    assert item["code"] == "print(1)"
    assert item["outputs"] == [{"type": "logs", "logs": "ran print(1)"}]
    assert item["container_id"] == "cntr_1"
    assert [call.arguments for call in tool.calls] == ["print(1)"]
    assert tool.closed == 1


def test_the_next_prompt_is_the_last_one_with_what_was_generated(start: Start) -> None:
    server = start(PYTHON, HELLO, providers=[fakes.python()])
    with server.http() as http:
        stream(http, {"model": MODEL, "input": "1?", "tools": [INTERPRETER]})
    first, second = server.engine.prompts
    assert second[: len(first) + len(harmony(PYTHON))] == [*first, *harmony(PYTHON)]
    assert server.prompt().endswith(
        "<|start|>python to=assistant<|channel|>analysis<|message|>ran print(1)<|end|><|start|>assistant"
    )


def test_usage_counts_every_token_once(start: Start) -> None:
    server = start(PYTHON, HELLO, providers=[fakes.python()])
    with server.http() as http:
        events = stream(http, {"model": MODEL, "input": "1?", "tools": [INTERPRETER]})
    usage = events[-1]["response"]["usage"]
    _, second = server.engine.prompts
    assert usage["output_tokens"] == len(harmony(PYTHON)) + len(harmony(HELLO))
    assert usage["total_tokens"] == len(second) + len(harmony(HELLO))
    assert usage["input_tokens"] == len(second) - len(harmony(PYTHON))
    assert usage["output_tokens_details"]["reasoning_tokens"] == len(harmony("Compute.") + harmony("The user greets."))


def test_a_search_is_one_item_and_its_citations_are_annotations(start: Start) -> None:
    server = start(SEARCH, CITED, providers=[fakes.browser()])
    with server.http() as http:
        body = {
            "model": MODEL,
            "input": "cats?",
            "tools": [{"type": "web_search"}],
            "include": ["web_search_call.action.sources"],
        }
        events = stream(http, body)
    search, message = events[-1]["response"]["output"]
    assert search["id"].startswith("ws_")
    assert search["action"]["sources"] == [{"type": "url", "url": fakes.PAGE.url}]
    part = message["content"][0]
    (note,) = part["annotations"]
    assert (note["lines"], note["quote"]) == ([1, 3], fakes.PAGE.quote[:200])
    assert part["text"][note["start_index"] : note["end_index"]] == "([example.com](https://example.com/page))"
    assert "【7†L2】" in part["text"], "a citation of nothing stays as it was written"
    added = [event for event in events if event["type"] == "response.output_text.annotation.added"]
    assert [event["annotation"] for event in added] == [note]
    assert [name for name in kinds(events) if "web_search" in name] == [
        "web_search_call.in_progress",
        "web_search_call.searching",
        "web_search_call.completed",
    ]


def test_citations_come_out_the_same_however_the_stream_is_cut(start: Start) -> None:
    texts = set()
    for chunk in (1, 2, 3, 5, 100):
        server = start(SEARCH, CITED, providers=[fakes.browser()], chunk=chunk)
        with server.http() as http:
            events = stream(http, {"model": MODEL, "input": "cats?", "tools": [{"type": "web_search_preview"}]})
        texts.add(json.dumps(events[-1]["response"]["output"][-1]["content"]))
    assert len(texts) == 1


def test_mcp_is_listed_called_and_mixed_with_functions(start: Start) -> None:
    server = start(MCP, HELLO, providers=[fakes.mcp()])
    with server.http() as http:
        tools = [WEATHER, {"type": "mcp", "server_label": "weather", "require_approval": "never"}]
        events = stream(http, {"model": MODEL, "input": "?", "tools": tools})
    listed, call = events[-1]["response"]["output"][:2]
    assert [tool["name"] for tool in listed["tools"]] == ["lookup", "erase"]
    assert (call["type"], call["output"], call["error"], call["status"]) == ("mcp_call", "sunny", None, "completed")
    assert "namespace weather {" in server.prompt(0)


def test_mcp_failure_is_a_failed_item_and_the_model_reads_it(start: Start) -> None:
    server = start(MCP, HELLO, providers=[fakes.mcp(fails=True)])
    with server.http() as http:
        tools = [{"type": "mcp", "server_label": "weather", "require_approval": "never"}]
        events = stream(http, {"model": MODEL, "input": "?", "tools": tools})
    call = events[-1]["response"]["output"][1]
    assert call["status"] == "failed"
    assert call["error"] == {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "no such city"}]}
    assert "mcp_call.failed" in kinds(events)
    assert "no such city" in server.prompt()


def test_mcp_approval_is_asked_and_then_runs_the_call(start: Start) -> None:
    tool = fakes.mcp()
    server = start(MCP, HELLO, providers=[tool])
    tools = [{"type": "mcp", "server_label": "weather", "require_approval": "always"}]
    with server.http() as http:
        first = stream(http, {"model": MODEL, "input": "?", "tools": tools})[-1]["response"]
        request = first["output"][-1]
        assert request["type"] == "mcp_approval_request"
        assert tool.calls == []
        answer = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
        again = {"model": MODEL, "previous_response_id": first["id"], "input": [answer], "tools": tools}
        twice = http.post("/responses", json={**again, "input": [answer, answer]})
        assert twice.json()["error"]["code"] == "approval_request_not_found"
        second = stream(http, again)[-1]["response"]
        assert [item["type"] for item in second["output"]] == ["mcp_call", "reasoning", "message"]
        assert second["output"][0]["approval_request_id"] == request["id"]
        stream(http, {"model": MODEL, "previous_response_id": second["id"], "input": "and?", "tools": tools})
        whole = [{"role": "user", "content": "?"}, *first["output"], answer, *second["output"]]
        stream(http, {"model": MODEL, "input": [*whole, {"role": "user", "content": "and?"}], "tools": tools})
    assert len(tool.calls) == 1, "what was approved once runs once"


def test_a_container_id_means_the_notebook_that_had_it(start: Start) -> None:
    tool = fakes.python()
    server = start(PYTHON, HELLO, PYTHON, HELLO, PYTHON, HELLO, providers=[tool])
    named = {"type": "code_interpreter", "container": "cntr_1"}
    with server.http() as http, server.http("bob") as bob:
        stream(http, {"model": MODEL, "input": "1?", "tools": [INTERPRETER]})
        stream(http, {"model": MODEL, "input": "2?", "tools": [named]})
        stream(bob, {"model": MODEL, "input": "3?", "tools": [named]})
    keys = [conversation for conversation, _ in tool.opened]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("stored", [True, False])
def test_a_client_that_echoes_its_items_finds_what_its_code_left(start: Start, stored: bool) -> None:
    """As in OpenAI's API, `auto` is the container of the conversation's last call, here only if the caller owns it."""

    async def run(call: ToolCall) -> ToolResult:
        return ToolResult([Text(call.arguments)], container_id="cntr_1", recall={"container": "cntr_1"})

    tool = fakes.python(run)
    server = start(PYTHON, HELLO, PYTHON, HELLO, PYTHON, HELLO, providers=[tool])
    asked: dict[str, Any] = {"model": MODEL, "tools": [INTERPRETER], "store": stored}
    items: list[dict[str, Any]] = [{"role": "user", "content": "1?"}]
    with server.http() as http, server.http("bob") as bob:
        items += stream(http, {**asked, "input": items})[-1]["response"]["output"]
        for item in items if stored else ():
            item |= (
                {"container_id": ""} if item.get("type") == "code_interpreter_call" else {}
            )  # Pydantic AI streams so
        items.append({"role": "user", "content": "2?"})
        again = stream(http, {**asked, "input": items})[-1]["response"]
        if stored:
            stream(http, {**asked, "input": "3?", "previous_response_id": again["id"]})
        stream(bob, {**asked, "input": [item for item in items if item.get("type") != "reasoning"]})
    *mine, other = [conversation for conversation, _ in tool.opened]
    assert set(mine) == {mine[0]}, "a chain that began with an echo goes on with the same, too"
    assert other.split(":")[0] != mine[0].split(":")[0]
    assert all(options.knows_all for _, options in tool.opened)
    past = [[call["recall"] for call in options.past] for _, options in tool.opened]
    assert past[:2] == [[], [{"container": "cntr_1"}]], "calls that only the client has ran, too"


@pytest.mark.parametrize("container", ["", "cntr_" + "1" * 100, "a\x00/../b", "é", "LiteLLM=="])
def test_an_echoed_call_may_name_any_container(start: Start, container: str) -> None:
    tool = fakes.python()
    server = start(HELLO, providers=[tool])
    item = {"type": "code_interpreter_call", "id": "ci_1", "status": "completed", "code": "1", "outputs": None}
    with server.http() as http:
        asked = [{**item, "container_id": container}, {"role": "user", "content": "?"}]
        create(http, input=asked, tools=[INTERPRETER])
    ((_, options),) = tool.opened
    assert list(options.past) == [{"recipient": "python", "recall": {"container": ""}}]


def test_a_cut_call_is_never_run(start: Start) -> None:
    tool = fakes.python()
    server = start(PYTHON, HELLO, providers=[tool])
    with server.http() as http:
        length = len(harmony(PYTHON)) - 1
        body = {"model": MODEL, "input": "1?", "tools": [INTERPRETER], "max_output_tokens": length}
        events = stream(http, body)
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete"
    assert tool.calls == []


def test_max_output_tokens_is_one_budget_for_all_turns(start: Start) -> None:
    server = start(PYTHON, HELLO, providers=[fakes.python()])
    budget = len(harmony(PYTHON)) + 6
    with server.http() as http:
        body = {"model": MODEL, "input": "1?", "tools": [INTERPRETER], "max_output_tokens": budget}
        response = stream(http, body)[-1]["response"]
    assert response["usage"]["output_tokens"] == budget
    assert response["status"] == "incomplete"


@pytest.mark.parametrize("ignored", [1, IGNORED_CALLS, IGNORED_CALLS + 1])
def test_max_tool_calls_ends_in_an_answer(start: Start, ignored: int) -> None:
    tool = fakes.python()
    server = start(PYTHON, *[PYTHON] * ignored, HELLO, providers=[tool])
    with server.http() as http:
        body = {"model": MODEL, "input": "1?", "tools": [INTERPRETER], "max_tool_calls": 1}
        response = stream(http, body)[-1]["response"]
    assert len(tool.calls) == 1
    assert [item["type"] for item in response["output"]].count("code_interpreter_call") == 1
    assert (response["output"][-1]["type"] == "message") is (ignored <= IGNORED_CALLS)
    assert response["status"] == "completed"


def test_a_dying_tool_fails_its_item_not_the_stream(start: Start) -> None:
    async def die(call: ToolCall) -> ToolResult:
        raise ConnectionError("gone")

    server = start(PYTHON, HELLO, providers=[fakes.python(die)])
    with server.http() as http:
        response = stream(http, {"model": MODEL, "input": "1?", "tools": [INTERPRETER]})[-1]["response"]
    assert response["status"] == "completed"
    assert response["output"][1]["status"] == "failed"
    assert "The tool failed: ConnectionError" in server.prompt()
    assert "gone" not in server.prompt()  # an exception's text may be confidential


def test_a_request_that_is_refused_closes_the_tools_that_it_opened(start: Start) -> None:
    tool = fakes.mcp()
    server = start(HELLO, providers=[tool], max_model_len=100)
    with server.http() as http:
        body = {"model": MODEL, "input": "word " * 200, "tools": [{"type": "mcp", "server_label": "weather"}]}
        assert http.post("/responses", json=body).status_code == 400
    assert (len(tool.opened), tool.closed) == (1, 1)


def test_tool_choice_none_leaves_the_tools_out_of_the_prompt(start: Start) -> None:
    server = start(CALL)
    with server.http() as http:
        response = stream(http, {"model": MODEL, "input": "?", "tools": [WEATHER], "tool_choice": "none"})[-1][
            "response"
        ]
    assert "get_weather" not in server.prompt()
    assert [item["type"] for item in response["output"]] != ["function_call"]


def test_state_of_a_tool_is_keyed_by_the_chain_and_the_tenant(start: Start) -> None:
    tool = fakes.python()
    server = start(PYTHON, HELLO, providers=[tool])
    with server.http() as http:
        first = stream(http, {"model": MODEL, "input": "1?", "tools": [INTERPRETER]})[-1]["response"]
        body = {"model": MODEL, "input": "2?", "tools": [INTERPRETER], "previous_response_id": first["id"]}
        stream(http, body)
    with server.http("bob") as http:
        stream(http, {"model": MODEL, "input": "1?", "tools": [INTERPRETER]})
    keys = [conversation for conversation, _ in tool.opened]
    assert keys[0] == keys[1] != keys[2]
    assert keys[0].split(":")[0] != keys[2].split(":")[0]


@pytest.mark.parametrize("choice", ["required", {"type": "code_interpreter"}])
@pytest.mark.parametrize("limit", [None, 1])
def test_a_forced_call_is_forced_once_and_then_the_model_can_answer(
    start: Start, choice: Any, limit: int | None
) -> None:
    def says(prompt: Sequence[int]) -> list[int]:
        forced = "final" not in (server.engine.samplings[-1].structural_tag or "final")
        return harmony(PYTHON if forced else HELLO)

    server = start(says, providers=[fakes.python()])
    body: dict[str, Any] = {"input": "1?", "tools": [INTERPRETER], "tool_choice": choice}
    if limit is not None:
        body["max_tool_calls"] = limit
    with server.http() as http:
        response = http.post("/responses", json=body).raise_for_status().json()
    kinds_of_items = [item["type"] for item in response["output"]]
    assert kinds_of_items == ["reasoning", "code_interpreter_call", "reasoning", "message"]
    first, second = (sampling.structural_tag or "" for sampling in server.engine.samplings)
    assert "channel|>final" not in first
    assert "channel|>final" in second
