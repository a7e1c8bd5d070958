"""Errors of a real server that a client must handle: a prompt that is too long, a wrong message."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from demo.server import NAME, Server

pytestmark = [pytest.mark.vllm, pytest.mark.serve]

WINDOW = 16_384


def post(server: Server, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": NAME, **fields}, timeout=120)


def words(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": " hello" * number}]


@pytest.fixture
def overhead(served: Server) -> int:
    """Tokens of a prompt in addition to its words."""
    count = post(served, "/v1/messages/count_tokens", messages=words(10)).json()
    return int(count["input_tokens"]) - 10


@pytest.mark.parametrize("tokens", [WINDOW, WINDOW + 684])
def test_a_prompt_that_is_too_long_is_machine_readable(served: Server, overhead: int, tokens: int) -> None:
    said = words(tokens - overhead)
    asked = {
        "/v1/chat/completions": ({"messages": said}, "messages"),
        "/v1/chat/completions/batch": ({"messages": [said]}, "messages"),
        "/v1/responses": ({"input": said[0]["content"], "store": False}, "input"),
        "/v1/completions": ({"prompt": " hello" * WINDOW}, "prompt"),
    }
    for path, (fields, what) in asked.items():
        for stream in (False, True) if "batch" not in path else (False,):
            answer = post(served, path, stream=stream, **fields)
            error = answer.json()["error"]
            assert answer.status_code == 400, path
            assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded"), path
            why = f"your {what} resulted in {WINDOW if what == 'prompt' else tokens} tokens."
            assert f"maximum context length is {WINDOW} tokens. However, {why}" in error["message"], path
    error = post(served, "/v1/messages", max_tokens=9, messages=said).json()
    why = f"prompt is too long: {tokens} tokens > {WINDOW} maximum"
    assert error == {"type": "error", "error": {"type": "invalid_request_error", "message": why}}


def test_a_prompt_of_any_length_is_counted(served: Server, overhead: int) -> None:
    for number in (WINDOW, 2 * WINDOW):
        counted = post(served, "/v1/messages/count_tokens", messages=words(number))
        assert counted.json()["input_tokens"] == number + overhead


def test_a_completion_longer_than_the_window_has_the_code_too(served: Server) -> None:
    error = post(served, "/v1/completions", prompt=" hello" * (WINDOW + 9)).json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    mistaken = post(served, "/v1/completions", prompt="x", max_tokens=0).json()["error"]
    assert mistaken["code"] == 400, "no prompt is too long there"


X = [{"role": "user", "content": "x"}]
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}
NAMED = {"type": "tool", "name": "rm"}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": {"x": "y" * 20_000}}]}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"messages": X, "max_tokens": None}, "max_tokens: Input should be a valid integer"),
    "role": ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role: Input should be"),
    "tool": ({"messages": X, "tools": [{"type": "web_search_20250305", "name": "w"}]}, "'web_search_20250305'"),
    "temperature": ({"messages": X, "temperature": 7}, "temperature must be in"),
    "no messages": ({"messages": []}, "at least one message"),
    "any of none": ({"messages": X, "tool_choice": {"type": "any"}}, "'any' needs tools"),
    "tool of none": ({"messages": X, "tool_choice": NAMED, "tools": [TOOL]}, "no tool 'rm' in tools"),
    "name": ({"messages": X, "tools": [{**TOOL, "name": "get weather"}]}, "cannot be called"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "text only"),
    "result": ({"messages": [{"role": "user", "content": [RESULT]}]}, ""),
    "document": (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "u"}}]}]},
        "messages.0.content.0: only documents",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_message_has_anthropics_error(served: Server, name: str) -> None:
    fields, why = WRONG[name]
    for stream in (False, True):
        answer = post(served, "/v1/messages", stream=stream, **{"max_tokens": 5, **fields})
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert why in answer.json()["error"]["message"]
    unknown = post(served, "/v1/messages", max_tokens=5, messages=X, model="other")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
