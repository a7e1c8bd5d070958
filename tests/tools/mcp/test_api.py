"""The tools inside `/v1/responses`: a real server and real tools; the model's turns are given."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from mcp.server.mcpserver import MCPServer

from tests.support.responses.replay import ReplayEngine
from tests.support.servers import example, running, session_of
from vllm_gptoss.server.harmony.tokens import encoding
from vllm_gptoss.server.responses.endpoint import ResponsesEndpoint
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.prompt.toolset import Providers, needs_approval
from vllm_gptoss.tools.protocol import ToolCall
from vllm_gptoss.tools.server import ToolServer, ToolServerOptions

DOCUMENTS = Path(__file__).parent.parent / "browser" / "documents"
ENVIRON = {"GPTOSS_BROWSER_DOCUMENTS": str(DOCUMENTS)}


class Model:
    """Returns its turns one after the other, and keeps the prompts it was given."""

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
async def api(model: Model, tools: ToolServer, store: str = "off") -> AsyncIterator[httpx.AsyncClient]:
    endpoint = ResponsesEndpoint(ResponsesOptions(store=store))
    app = FastAPI()
    endpoint.attach_router(app)
    async with tools:
        models: Any = lambda name: ("gpt-oss", None)  # noqa: E731
        await endpoint.open(ReplayEngine(model), models, Providers(tools.providers, tools.remote))
        async with running(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield client
        await endpoint.aclose()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One example server for all tests that leave it as it was."""
    with example("streamable_http") as (address, _):
        yield address


async def ask(client: httpx.AsyncClient, *tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    answer = await client.post(
        "/v1/responses", json={"model": "gpt-oss", "input": "?", "store": False, "tools": list(tools), **fields}
    )
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_every_way_in_which_gpt_oss_writes_a_citation_means_the_same_lines() -> None:
    said = "A【0†L5-L6】 b【0†L5–L6】 c【0†L5-6】 d【0†L5-L6†dams.example】 e【0†L5】 f【9†L1】 g【0†The Velmora dam】."
    model = Model(call("browser.open", '{"id": "https://dams.example/velmora"}'), final(said))
    tools = ToolServer.from_spec("browser", ToolServerOptions(environ=ENVIRON))
    async with api(model, tools) as client:
        body = await ask(client, {"type": "web_search"})
    part = body["output"][-1]["content"][0]
    assert [citation.get("lines") for citation in part["annotations"]] == [[5, 6]] * 4 + [[5, 5], None]
    link = "([dams.example](https://dams.example/velmora))"
    assert {part["text"][c["start_index"] : c["end_index"]] for c in part["annotations"]} == {link}
    assert "f【9†L1】" in part["text"]  # nothing was opened there


async def test_wrong_arguments_go_back_to_the_model_which_tries_again() -> None:
    model = Model(call("browser.search", '{"q": "dam"}'), call("browser.search", '{"query": "dam"}'), final("Found."))
    tools = ToolServer.from_spec("browser", ToolServerOptions(environ=ENVIRON))
    async with api(model, tools) as client:
        body = await ask(client, {"type": "web_search"})
    assert "'query' is a required property" in model.prompts[1]
    assert [item["status"] for item in body["output"] if item["type"] == "web_search_call"] == ["failed", "completed"]


@pytest.mark.parametrize("allowed", [True, False])
async def test_a_server_url_is_honoured_only_for_allowed_hosts(allowed: bool, url: str) -> None:
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


async def test_a_conversation_that_goes_on_in_another_process_keeps_its_cursors(tmp_path: Path) -> None:
    """Two servers with one store, as two API server processes or one before and after a restart."""
    store = str(tmp_path / "store.db")
    search = {"type": "web_search"}
    first = Model(
        call("browser.search", '{"query": "Velmora dam metres lighthouse"}'),
        call("browser.open", '{"id": 0}'),
        final("."),
    )
    second = Model(
        call("browser.find", '{"cursor": 1, "pattern": "87 metres"}'),  # a page that the other process opened
        call("browser.open", '{"cursor": 0, "id": 1}'),  # a link of its search results
        call("browser.open", '{"cursor": 0, "loc": 3}'),  # what cannot be had again
        final("High【1†L5】, and bright【3†L1】."),
    )
    third = Model(call("browser.open", '{"cursor": 2}'), final("So【3†L1】."))
    one, two = (ToolServer.from_spec("browser", ToolServerOptions(environ=ENVIRON)) for _ in range(2))
    async with api(first, one, store) as here, api(second, two, store) as there:
        asked = await ask(here, search, store=True)
        again = await ask(there, search, store=True, previous_response_id=asked["id"])
        first.turns, first.prompts = third.turns, []
        back = await ask(here, search, store=True, previous_response_id=again["id"])
    assert "[2] Find results for text: `87 metres` in `The Velmora dam`" in second.prompts[1]
    assert "[3] " in second.prompts[2]
    assert "no longer available. Search again" in second.prompts[3]
    cited = again["output"][-1]["content"][0]["annotations"]
    assert [citation["url"] for citation in cited] == ["https://dams.example/velmora", opened_by(again, 1)]
    assert "no longer available" in first.prompts[1]
    (last,) = back["output"][-1]["content"][0]["annotations"]
    assert last["url"] == opened_by(again, 1)  # `here` never showed cursor 3 and yet knows what it is


def opened_by(body: dict[str, Any], number: int) -> str:
    """The URL that the `number`th browser call of the response opened."""
    calls = [item for item in body["output"] if item["type"] == "web_search_call"]
    return str(calls[number]["action"]["url"])


async def test_python_that_moved_to_another_process_says_that_its_variables_are_gone(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    tool = {"type": "code_interpreter", "container": {"type": "auto"}}
    models = [
        Model(call("python", "x = 6\nx"), final("Six.")),
        Model(call("python", "print('x' in globals())"), final("No.")),
    ]
    one, two = (ToolServer.from_spec("python", ToolServerOptions(environ={})) for _ in range(2))
    async with api(models[0], one, store) as here, api(models[1], two, store) as there:
        if one.providers[0].unavailable:
            pytest.skip(one.providers[0].unavailable)
        asked = await ask(here, tool, store=True)
        await ask(there, tool, store=True, previous_response_id=asked["id"])
    assert "This python session is new" in models[1].prompts[1]
    assert "False" in models[1].prompts[1]
    assert "This python session is new" not in models[0].prompts[1]


async def test_an_authorization_is_in_no_store_no_log_and_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    caplog.set_level(logging.DEBUG)
    secrets = ("tok-SECRET-1", "key-SECRET-2")
    calls = [turn for _ in range(3) for turn in (call("mine.header", '{"name": "x-plan"}'), final("Done."))]
    tools = ToolServer.from_spec(
        "browser", ToolServerOptions(environ={**ENVIRON, "GPTOSS_MCP_ALLOWED_HOSTS": url.split("/")[2]})
    )
    tool = {"type": "mcp", "server_label": "mine", "server_url": url, "authorization": secrets[0]}
    tool |= {"headers": {"X-Key": secrets[1], "X-Plan": "gold"}, "require_approval": "never"}
    async with api(Model(*calls), tools, str(tmp_path / "store.db")) as client:
        shown = [await ask(client, tool, store=True)]
        background = await ask(client, tool, store=True, background=True)
        while background["status"] in ("queued", "in_progress"):
            background = (await client.get(f"/v1/responses/{background['id']}")).json()
        shown.append(background)
        wrong = {**tool, "server_label": "not a label"}
        refused = await client.post("/v1/responses", json={"model": "gpt-oss", "input": "?", "tools": [wrong]})
        streamed = await client.post(
            "/v1/responses", json={"model": "gpt-oss", "input": "?", "tools": [tool], "stream": True}
        )
        assert "gold" in streamed.text
    assert [item["output"] for body in shown for item in body["output"] if item["type"] == "mcp_call"] == ["gold"] * 2
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"server_url" in kept  # the request is there, and what it brought in secret is not
    everything = kept.decode("latin-1") + caplog.text + json.dumps(shown) + refused.text + streamed.text
    assert [secret for secret in secrets if secret in everything] == []


async def test_a_browser_behind_mcp_cannot_be_promised_to_keep_to_domains() -> None:
    server = MCPServer("browser", log_level="CRITICAL")

    @server.tool(structured_output=False)
    def search(query: str) -> str:
        return "[0] x\n**viewing lines [0 - 0] of 0**\n\nL0: x"

    async with running(server.sse_app()) as url:
        tools = ToolServer.from_spec(url.removeprefix("http://"), ToolServerOptions(environ={}))
        async with api(Model(final("Hi.")), tools) as client:
            for field, tool in (
                ("filters.allowed_domains", {"filters": {"allowed_domains": ["dams.example"]}}),
                ("external_web_access", {"external_web_access": False}),
            ):
                body = {"model": "gpt-oss", "input": "?", "tools": [{"type": "web_search", **tool}]}
                answer = await client.post("/v1/responses", json=body)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"tools[0].{field}")
            assert (await ask(client, {"type": "web_search"}))["status"] == "completed"


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_stops_the_call_on_the_server(streams: bool, url: str) -> None:
    note = f"left-{streams}"
    tools = ToolServer.from_spec(url, ToolServerOptions(environ={}))
    async with api(Model(call("example.hang", json.dumps({"note": note})), final("Never.")), tools) as client:
        session = await session_of(tools, "example", "other")

        async def noted() -> str:
            return (await session.call(ToolCall("1", "example", "seen", json.dumps({"note": note})))).text

        tool = {"type": "mcp", "server_label": "example", "require_approval": "never"}
        body = {"model": "gpt-oss", "input": "?", "store": False, "tools": [tool], "stream": streams}
        asked = asyncio.create_task(client.post("/v1/responses", json=body))
        async with asyncio.timeout(30):
            while await noted() != "began":
                await asyncio.sleep(0.05)
            asked.cancel()  # closes the connection
            while await noted() != "began,cancelled":
                await asyncio.sleep(0.05)
        await session.aclose()


READ, WRITE = {"readOnlyHint": True}, {"readOnlyHint": False}


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        (None, "read write none"), ("always", "read write none"), ("never", ""),
        ({"never": {"tool_names": ["read"]}}, "write none"),
        ({"always": {"tool_names": ["write"]}}, "read write none"),  # what no filter names needs a word
        ({"never": {"read_only": True}}, "write none"),
        ({"always": {"read_only": False}, "never": {"tool_names": ["read", "write"]}}, "write none"),
        ({"never": {"tool_names": ["write"], "read_only": True}}, "read write none"),  # named, and yet it writes
        ({"always": {"tool_names": ["read"], "read_only": False}, "never": {"read_only": True}}, "read write none"),
        ({}, "read write none"), ({"never": {}}, "read write none"), ({"never": {"tool_names": []}}, "read write none"),
    ],
)  # fmt: skip
def test_which_calls_wait_for_a_person(policy: Any, asked: str) -> None:
    tools: dict[str, dict[str, bool]] = {"read": READ, "write": WRITE, "none": {}}
    assert " ".join(name for name, hints in tools.items() if needs_approval(policy, name, hints)) == asked


@pytest.mark.parametrize("approve", [True, False])
@pytest.mark.parametrize("stored", [True, False])
async def test_an_approval_goes_round_by_reference_and_by_echo(
    approve: bool, stored: bool, tmp_path: Path, url: str
) -> None:
    turns = Model(call("example.add", '{"a": 20, "b": 22}'), final("Done."))
    tool = {"type": "mcp", "server_label": "example", "require_approval": {"always": {"tool_names": ["add"]}}}
    tools = ToolServer.from_spec(url, ToolServerOptions(environ={}))
    async with api(turns, tools, str(tmp_path / "store.db")) as client:
        first = await ask(client, tool, store=stored)
        request = first["output"][-1]
        assert (request["type"], request["arguments"]) == ("mcp_approval_request", '{"a": 20, "b": 22}')
        answer = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": approve}
        if not approve:
            answer["reason"] = "not on Fridays"
        said = {"role": "user", "content": "?"}
        past = {"previous_response_id": first["id"]} if stored else {}
        both = [answer] if stored else [said, *first["output"], answer]
        second = await ask(client, tool, store=stored, input=both, **past)
        again = await client.post(
            "/v1/responses",
            json={"model": "gpt-oss", "input": [{**answer, "approval_request_id": "mcpr_no"}], "tools": [tool]},
        )
    assert again.status_code == 400
    ran = [item for item in second["output"] if item["type"] == "mcp_call"]
    assert [(item["output"], item["approval_request_id"]) for item in ran] == (
        [("42", request["id"])] if approve else []
    )
    assert ("42" if approve else "The user denied this call: not on Fridays") in turns.prompts[1]
    assert "mcp_list_tools" not in [item["type"] for item in second["output"]]  # the conversation has it already
