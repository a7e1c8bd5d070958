"""The tools inside `/v1/responses`: a real server and real tools; the model's turns are given."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.tools.servers import EXAMPLE, example, running
from vllm_gptoss.harmony.tokens import encoding
from vllm_gptoss.responses.config import ResponsesConfig
from vllm_gptoss.responses.endpoint import ResponsesEndpoint
from vllm_gptoss.responses.engine import ReplayEngine
from vllm_gptoss.responses.toolset import Providers
from vllm_gptoss.tools.server import ToolServer, ToolServerOptions

DOCUMENTS = Path(__file__).parent.parent / "browser" / "documents"
ENVIRON = {"GPTOSS_BROWSER_DOCUMENTS": str(DOCUMENTS)}


class Model:
    """Says its turns one after the other, and keeps the prompts it was given."""

    def __init__(self, *turns: str) -> None:
        self.turns = list(turns)
        self.prompts: list[str] = []

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        self.prompts.append(str(encoding().decode(list(prompt))))
        said: list[int] = encoding().encode(self.turns.pop(0), allowed_special="all")
        return said


def call(recipient: str, arguments: str) -> str:
    return f" to={recipient}<|channel|>analysis code<|message|>{arguments}<|call|>"


def final(text: str) -> str:
    return f"<|channel|>final<|message|>{text}<|return|>"


@asynccontextmanager
async def api(model: Model, tools: ToolServer) -> AsyncIterator[httpx.AsyncClient]:
    endpoint = ResponsesEndpoint(ResponsesConfig(store="off"))
    app = FastAPI()
    endpoint.attach_router(app)
    async with tools:
        models: Any = lambda name: ("gpt-oss", None)  # noqa: E731
        await endpoint.open(ReplayEngine(model), models, Providers(tools.providers, tools.remote))
        async with running(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield client
        await endpoint.aclose()


async def ask(client: httpx.AsyncClient, *tools: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(
        "/v1/responses", json={"model": "gpt-oss", "input": "?", "store": False, "tools": list(tools)}
    )
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_search_open_find_and_a_citation_of_the_right_lines() -> None:
    model = Model(
        call("browser.search", '{"query": "Velmora reservoir"}'),
        call("browser.open", '{"id": 0}'),
        call("browser.find", '{"pattern": "87 metres"}'),
        final("It is 87 metres high【1†L5-L6】."),
    )
    tools = ToolServer.from_spec("browser", ToolServerOptions(environ=ENVIRON))
    async with api(model, tools) as client:
        body = await ask(client, {"type": "web_search"})
    searched, opened, found, message = (item for item in body["output"] if item["type"] != "reasoning")
    assert [item["type"] for item in (searched, opened, found)] == ["web_search_call"] * 3
    assert searched["action"]["query"] == "Velmora reservoir"
    assert opened["action"] == {"type": "open_page", "url": "https://dams.example/velmora"}
    assert found["action"]["pattern"] == "87 metres"
    (citation,) = message["content"][0]["annotations"]
    assert (citation["url"], citation["title"]) == ("https://dams.example/velmora", "The Velmora dam")
    assert "[1] The Velmora dam (https://dams.example/velmora)\n" in model.prompts[2]
    assert "L5: It is 87 metres high" in model.prompts[2]


async def test_wrong_arguments_go_back_to_the_model_which_tries_again() -> None:
    model = Model(call("browser.search", '{"q": "dam"}'), call("browser.search", '{"query": "dam"}'), final("Found."))
    tools = ToolServer.from_spec("browser", ToolServerOptions(environ=ENVIRON))
    async with api(model, tools) as client:
        body = await ask(client, {"type": "web_search"})
    assert "'query' is a required property" in model.prompts[1]
    assert [item["status"] for item in body["output"] if item["type"] == "web_search_call"] == ["failed", "completed"]


async def test_mcp_over_stdio_with_a_result_and_an_error() -> None:
    model = Model(call("example.add", '{"a": 20, "b": 22}'), call("example.refuse", "{}"), final("42, and no ticket."))
    tools = ToolServer.from_spec(f"stdio:{sys.executable} {EXAMPLE} stdio", ToolServerOptions(environ={}))
    async with api(model, tools) as client:
        body = await ask(client, {"type": "mcp", "server_label": "example", "require_approval": "never"})
    assert "mcp_list_tools" in [item["type"] for item in body["output"]]
    added, refused = (item for item in body["output"] if item["type"] == "mcp_call")
    assert (added["output"], added.get("error")) == ("42", None)
    assert "no such ticket" in str(refused["error"])
    assert "no such ticket" in model.prompts[2]


async def test_a_server_that_dies_costs_its_call_and_the_answer_comes() -> None:
    model = Model(call("example.die", "{}"), final("It broke."))
    with example("streamable_http") as (url, _):
        async with api(model, ToolServer.from_spec(url, ToolServerOptions(environ={}))) as client:
            body = await ask(client, {"type": "mcp", "server_label": "example", "require_approval": "never"})
    assert body["status"] == "completed"
    (died,) = (item for item in body["output"] if item["type"] == "mcp_call")
    assert died["error"]
    assert "may have run" in model.prompts[1]


@pytest.mark.parametrize("allowed", [True, False])
async def test_a_server_url_is_honoured_only_for_allowed_hosts(allowed: bool) -> None:
    with example("streamable_http") as (url, _):
        environ = {"GPTOSS_MCP_ALLOWED_HOSTS": url.split("/")[2]} if allowed else {}
        tools = ToolServer.from_spec("browser", ToolServerOptions(environ={**ENVIRON, **environ}))
        model = Model(call("mine.header", '{"name": "authorization"}'), final("Done."))
        tool = {
            "type": "mcp",
            "server_label": "mine",
            "server_url": url,
            "authorization": "tok",
            "require_approval": "never",
        }
        async with api(model, tools) as client:
            if allowed:
                body = await ask(client, tool)
                (called,) = (item for item in body["output"] if item["type"] == "mcp_call")
                assert called["output"] == "Bearer tok"
            else:
                answer = await client.post("/v1/responses", json={"model": "gpt-oss", "input": "?", "tools": [tool]})
                assert answer.status_code == 400
                assert "allowed_hosts" in answer.text
