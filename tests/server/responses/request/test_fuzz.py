"""Any JSON is a checked request or an `ApiError`: another exception would be a 500."""

from __future__ import annotations

import asyncio
import copy
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import scale
from vllm_gptoss.server.responses import ids
from vllm_gptoss.server.responses.errors import ApiError
from vllm_gptoss.server.responses.prompt.constraint import constraints
from vllm_gptoss.server.responses.prompt.developer import response_format
from vllm_gptoss.server.responses.prompt.history import HistoryReader
from vllm_gptoss.server.responses.prompt.toolset import Toolset
from vllm_gptoss.server.responses.request.create import parse_create
from vllm_gptoss.server.responses.request.files import read_pdfs
from vllm_gptoss.server.responses.run.response_object import new_response

CALL = {"call_id": "c", "name": "f"}
TEXT = {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}
FULL: dict[str, Any] = {
    "model": "m",
    "instructions": "x",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"role": "user", "content": [{"type": "input_file", "filename": "f", "file_data": "aGk="}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "function_call", "arguments": "{}", **CALL},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "custom_tool_call", "input": "x", "call_id": "d", "name": "g"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "x"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "code_interpreter_call", "id": "ci", "container_id": "", "status": "completed", "code": "1"},
        {"type": "mcp_call", "id": "mc", "server_label": "s", "name": "t", "arguments": "{}", "output": "x"},
        {"type": "mcp_list_tools", "id": "ml", "server_label": "s", "tools": []},
        {"type": "mcp_approval_request", "id": "mr", "server_label": "s", "name": "t", "arguments": "{}"},
        {"type": "mcp_approval_response", "approval_request_id": "mr", "approve": True},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [TEXT]},
    ],
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
        {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}},
        {"type": "namespace", "name": "n", "description": "x", "tools": [{"type": "function", "name": "h"}]},
        {"type": "mcp", "server_label": "s", "require_approval": {"never": {"tool_names": ["a"]}}},
        {"type": "web_search", "filters": {"allowed_domains": ["a"]}, "user_location": {"city": "x"}},
        {"type": "code_interpreter", "container": {"type": "auto", "network_policy": {"type": "disabled"}}},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "conversation": {"id": "c"},
    "context_management": [{"type": "compaction", "compact_threshold": 5}],
    "stop": ["x"],
    "logit_bias": {"1": 1.0},
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(p for key, value in inner for p in places(value, (*path, key)))] if path or inner else [path]


PLACES = [path for path in places(FULL) if path]


def put(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(FULL)
    node: Any = body
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return body


def use(body: Any) -> None:
    """All steps with a body before tools are opened."""
    asyncio.run(read_pdfs(body, ""))
    request = parse_create(body)
    new_response(request, ids.new("resp"), "m", {})
    response_format(request)
    HistoryReader({}, lambda text, purpose: None).read(request.items)
    if request.tool_choice in ("auto", "none"):
        asyncio.run(constraints(request, Toolset()))


def test_the_full_request_is_good() -> None:
    use(FULL)


@pytest.mark.soak
@settings(max_examples=scale.count(2000, 400), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(PLACES), JSON)
def test_one_wrong_value_anywhere_is_an_api_error(path: tuple[Any, ...], value: Any) -> None:
    with suppress(ApiError):
        use(put(path, value))


@settings(max_examples=300, deadline=None)
@given(JSON)
def test_any_json_is_an_api_error(body: Any) -> None:
    with suppress(ApiError):
        use(body)
