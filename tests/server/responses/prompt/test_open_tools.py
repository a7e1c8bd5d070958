"""Which tools a request opens, and which calls wait for its client's approval."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.responses import fakes
from tests.support.responses.server import MODEL, Start, create, harmony, text_of_prompt
from tests.support.responses.turns import HELLO, INTERPRETER
from vllm_gptoss.tools.protocol import ToolProvider
from vllm_gptoss.tools.server import ToolServer, ToolServerOptions

OWN, CONFIGURED = {"server_url": "http://mcp.example/mcp"}, dict[str, str]()
ANY: dict[str, Any] = {}
BOTH, READS, WRITES = {"lookup", "erase"}, {"lookup"}, {"erase"}
POLICIES: list[tuple[Any, set[str]]] = [
    ("always", BOTH),
    ("never", set()),
    ({"never": {"tool_names": ["lookup"]}}, WRITES),
    ({"always": {"tool_names": ["erase"]}}, BOTH),  # a tool in no filter waits
    ({"never": {"read_only": True}}, WRITES),
    ({"always": {"read_only": False}, "never": {"tool_names": ["lookup", "erase"]}}, WRITES),
    ({"never": {"tool_names": ["erase"], "read_only": True}}, BOTH),  # `erase` is named, but writes
    ({"always": {"tool_names": ["lookup"], "read_only": False}, "never": {"read_only": True}}, BOTH),
    ({}, BOTH),
    ({"never": {}}, BOTH),
    ({"never": {"tool_names": []}}, BOTH),
    (None, BOTH),  # a configured server: the operator's policy alone
]


def call_named_by_input(prompt: Sequence[int]) -> list[int]:
    name = "erase" if "Call erase" in text_of_prompt(prompt) else "lookup"
    return harmony(f" to=weather.{name}<|channel|>commentary<|message|>{{}}<|call|>")


@pytest.mark.parametrize(("policy", "waiting"), POLICIES)
def test_a_call_waits_for_approval_where_the_request_or_the_operator_requires_it(
    start: Start, policy: Any, waiting: set[str]
) -> None:
    provider = fakes.mcp()

    async def remote(tool: Mapping[str, Any]) -> ToolProvider:
        return provider

    server = start(call_named_by_input, providers=[provider], remote=remote)
    operators: list[set[str]] = [set(), READS, WRITES]
    with server.http() as http:
        rows = itertools.product((OWN, CONFIGURED), operators, (ANY, {"allowed_tools": {"read_only": True}}), BOTH)
        for own, operator, tools, name in rows:
            provider.calls.clear()
            provider.needs_approval = operator.__contains__  # type: ignore[method-assign]
            tool = {"type": "mcp", "server_label": "weather", **own, **tools}
            tool |= {} if policy is None else {"require_approval": policy}
            body = {"model": MODEL, "input": f"Call {name}.", "tools": [tool], "max_tool_calls": 1, "store": False}
            kinds = [item["type"] for item in http.post("/responses", json=body).raise_for_status().json()["output"]]
            by_request = set() if policy is None and own is CONFIGURED else waiting
            is_offered = name == "lookup" or tools is ANY
            runs = is_offered and name not in by_request | operator
            row = (own, operator, tools, name)
            assert ("mcp_approval_request" in kinds) is (is_offered and not runs), row
            assert {call.tool for call in provider.calls} == ({name} if runs else set()), row
            assert ("type erase =" in server.prompt()) is (tools is ANY), row


def test_options_that_the_browser_ignores_are_refused_where_they_restrict_it(start: Start) -> None:
    browser = fakes.browser()
    server = start(HELLO, providers=[browser])
    with server.http() as http:
        for honours, external, status in ((False, True, 200), (False, False, 400), (True, False, 200)):
            browser.honours_web_options = honours
            tool = {"type": "web_search", "external_web_access": external}
            assert http.post("/responses", json={"input": "hi", "tools": [tool]}).status_code == status


def test_counting_tokens_opens_no_python_and_no_mcp_session(start: Start) -> None:
    python, weather = fakes.python(), fakes.mcp()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        own = {"type": "mcp", "server_label": "own", "server_url": f"http://{host}/mcp"}
        tools = ToolServer.from_spec("python", ToolServerOptions(environ={"GPTOSS_MCP_ALLOWED_HOSTS": host}))
        server = start(HELLO, providers=[python, weather], remote=tools.remote)
        listener.settimeout(0)
        with server.http() as http:
            body = {"model": MODEL, "input": "hi", "tools": [INTERPRETER, {"type": "mcp", "server_label": "weather"}]}
            counted = http.post("/responses/input_tokens", json=body).raise_for_status().json()["input_tokens"]
            http.post("/responses/input_tokens", json={**body, "tools": [own]}).raise_for_status()
            assert python.opened == weather.opened == []
            with pytest.raises(BlockingIOError):
                listener.accept()
            assert create(http, **body)["usage"]["input_tokens"] == counted
            with ThreadPoolExecutor(1) as pool:  # a response connects
                created = pool.submit(http.post, "/responses", json={**body, "tools": [own]})
                listener.settimeout(60)
                listener.accept()[0].close()
                listener.close()
                assert created.result(60).is_error


def test_counting_tokens_counts_the_tools_that_an_mcp_server_has_listed(start: Start) -> None:
    async def remote(tool: Mapping[str, Any]) -> ToolProvider:
        return fakes.mcp()

    server = start(HELLO, remote=remote)
    with server.http() as http:
        tools = [{"type": "mcp", "server_label": "weather", "server_description": "Weather.", **OWN}]
        first = create(http, input="hi", tools=tools)
        body = {"model": MODEL, "input": "again", "tools": tools, "previous_response_id": first["id"]}
        counted = http.post("/responses/input_tokens", json=body).raise_for_status().json()["input_tokens"]
        assert counted == create(http, **body)["usage"]["input_tokens"]
        assert "type erase =" in server.prompt()
