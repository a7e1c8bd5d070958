"""All tools together: one that is down affects no other; requests reach only allowed servers; tools serve others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.client.sse import sse_client
from mcp.server.mcpserver import Context, MCPServer
from typer.testing import CliRunner

from tests.support.servers import EXAMPLE, example, running, session_of
from tests.support.waiting import until
from vllm_gptoss.server.responses.prompt.toolset import Providers
from vllm_gptoss.tools.browser.backends import API_BACKENDS
from vllm_gptoss.tools.check import check_tools
from vllm_gptoss.tools.mcp.provider import McpProvider
from vllm_gptoss.tools.mcp.settings import McpServerConfig
from vllm_gptoss.tools.protocol import (
    Namespace,
    SessionOptions,
    Source,
    ToolCall,
    ToolKind,
    ToolProvider,
    ToolResult,
    ToolSession,
)
from vllm_gptoss.tools.serve import http_app
from vllm_gptoss.tools.server import ToolServer, ToolServerOptions

DOCUMENTS = Path(__file__).parent / "browser" / "documents"
ENVIRON = {"GPTOSS_BROWSER_DOCUMENTS": str(DOCUMENTS)}


async def do(session: ToolSession, namespace: str, tool: str | None, arguments: str) -> ToolResult:
    return await session.call(ToolCall("call_1", namespace, tool, arguments))


async def test_one_spec_starts_everything_and_what_is_down_is_off_alone(caplog: pytest.LogCaptureFixture) -> None:
    with example("streamable_http") as (url, _):
        spec = f"browser,{url},stdio:{sys.executable} {EXAMPLE} stdio,127.0.0.1:1,stdio:/nonexistent"
        async with ToolServer.from_spec(spec, ToolServerOptions(environ=ENVIRON)) as server:
            # two claim `example`
            assert [namespace.name for namespace in server.namespaces()] == ["example", "browser"]
            assert "two tools are called example; the first configured server is used" in caplog.text
            off = [each for each in server.providers if each.unavailable]
            assert len(off) == 2
            session = await session_of(server, "browser", "c")
            assert "【0†" in (await do(session, "browser", "search", '{"query": "dam"}')).text
            session = await session_of(server, "example", "c")
            assert (await do(session, "example", "add", '{"a": 1}')).text == "2"
            wrong = await do(session, "example", "add", '{"a": "one"}')
            assert wrong.error.type == "invalid_arguments"


class Broken(ToolProvider):
    """A provider that breaks its contract."""

    name = "broken"
    unavailable: str | None = "not started"

    async def start(self) -> None:
        raise RuntimeError("bug")

    def namespaces(self) -> Sequence[Namespace]:
        return ()

    async def open(self, conversation_id: str, options: SessionOptions) -> Any:
        raise AssertionError

    async def aclose(self) -> None:
        raise RuntimeError("bug")


async def test_a_provider_with_a_bug_does_not_stop_the_others() -> None:
    browser = ToolServer.from_spec("browser", ToolServerOptions(environ=ENVIRON)).providers[0].inner
    async with ToolServer([Broken(), browser]) as server:
        assert [namespace.name for namespace in server.namespaces()] == ["browser"]


BROWSER_TEXT = "[0] dam\n**viewing lines [0 - 1] of 1**\n\nL0: a\nL1: b"
PAGE_TEXT = "[1] The dam (https://dams.example/)\n**viewing lines [0 - 1] of 1**\n\nL0: a\nL1: b"


def openais_servers() -> dict[str, MCPServer]:
    """The shapes of openai/gpt-oss's gpt-oss-mcp-server: the browser keyed by client id, python with free text."""
    browser = MCPServer("browser", instructions="Tool for browsing.", log_level="CRITICAL")
    python = MCPServer("python", instructions="Runs code.", log_level="CRITICAL")
    pages: dict[str | None, list[str]] = {}

    @browser.tool(structured_output=False)
    async def search(ctx: Context[Any, Any], query: str, topn: int = 10, source: str | None = None) -> str:
        pages.setdefault((ctx.request_context.meta or {}).get("client_id"), []).append(query)
        return BROWSER_TEXT

    @browser.tool(name="open", structured_output=False)
    async def open_link(ctx: Context[Any, Any], id: int | str = -1, cursor: int = -1) -> str:  # noqa: A002
        return PAGE_TEXT if pages.get((ctx.request_context.meta or {}).get("client_id")) else "No pages to access!"

    @python.tool(name="python", structured_output=False)
    async def run(code: str) -> str:
        return f"ran {code}"

    return {"browser": browser, "python": python}


@pytest.fixture
async def upstream() -> AsyncIterator[ToolServer]:
    servers = openais_servers()
    async with running(servers["browser"].sse_app()) as browser, running(servers["python"].sse_app()) as python:
        hosts = [url.removeprefix("http://") for url in (browser, python)]
        async with ToolServer.from_spec(",".join(hosts), ToolServerOptions(environ={})) as server:
            yield server


async def test_openais_example_servers_take_the_builtin_tools_places(upstream: ToolServer) -> None:
    kinds = {n.name: (n.kind, n.description, [t.include_in_prompt for t in n.tools]) for n in upstream.namespaces()}
    assert kinds == {
        "browser": (ToolKind.BROWSER, "Tool for browsing.", [True, True]),
        "python": (ToolKind.PYTHON, "Runs code.", [False]),
    }
    python = await session_of(upstream, "python", "alice")
    assert (await do(python, "python", None, 'print("hi")\n')).text == 'ran print("hi")\n'
    alice = await session_of(upstream, "browser", "alice")
    bob = await session_of(upstream, "browser", "bob")
    searched = await do(alice, "browser", "search", '{"query": "dam"}')
    assert (searched.action.type, searched.action.query) == ("search", "dam")
    opened = await do(alice, "browser", "open", '{"id": 0}')
    assert (opened.action.type, opened.action.url) == ("open_page", "https://dams.example/")
    assert alice.source(1) == Source(1, "https://dams.example/", "The dam")
    assert (await do(bob, "browser", "open", '{"id": 0}')).text == "No pages to access!"
    for session in (python, alice, bob):
        await session.aclose()


async def test_a_server_takes_no_name_that_the_operator_gave_out(tmp_path: Path) -> None:
    theirs = MCPServer("browser", log_level="CRITICAL"), MCPServer("tickets", log_level="CRITICAL")
    for server in theirs:
        server.add_tool(lambda: "theirs", name="search")
    async with running(theirs[0].sse_app()) as first, running(theirs[1].sse_app()) as second:
        (tmp_path / "tools.yaml").write_text("mcp: {tickets: {url: 'http://127.0.0.1:1/mcp', connect_timeout_s: 1}}")
        hosts = ",".join(url.removeprefix("http://") for url in (first, second))
        spec = f"{hosts},browser,{tmp_path / 'tools.yaml'}"
        async with ToolServer.from_spec(spec, ToolServerOptions(environ=ENVIRON)) as server:
            assert [n.name for n in server.namespaces()] == ["mcp_browser", "mcp_tickets", "browser"]
            session = await session_of(server, "browser", "alice")
            assert "【0†" in (await do(session, "browser", "search", '{"query": "dam"}')).text
            core = Providers(server.providers)
            labelled = core.named("tickets")
            assert labelled.unavailable  # the operator's server, which is down, and not the one that took its name
            python = core.of_kind(ToolKind.PYTHON)
            assert python is None


@pytest.mark.parametrize("form", ["http", "stdio"])
async def test_only_upstreams_form_lets_a_server_be_python(form: str) -> None:
    async with running(openais_servers()["python"].sse_app()) as url:
        spec = f"{url}/sse"
        if form == "stdio":
            code = "from mcp.server.mcpserver import MCPServer; s = MCPServer('python'); s.add_tool(print); s.run()"
            spec = f'stdio:{sys.executable} -c "{code}"'
        async with ToolServer.from_spec(spec, ToolServerOptions(environ=ENVIRON)) as server:
            assert [(n.name, n.kind) for n in server.namespaces()] == [("mcp_python", ToolKind.MCP)]
            assert Providers(server.providers).of_kind(ToolKind.PYTHON) is None


RENAMED = """
import os, pathlib
from mcp.server.mcpserver import MCPServer
before = pathlib.Path("before")
server = MCPServer("python" if before.exists() else "weather")
server.add_tool(lambda: os._exit(1), name="end")
before.touch()
server.run()
"""


async def test_a_server_that_renames_itself_keeps_its_first_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "server.py").write_text(RENAMED)
    config = McpServerConfig(command=sys.executable, args=["server.py"], cwd=tmp_path, connect_timeout_s=60)
    provider = McpProvider("", config)
    await provider.start()
    assert [n.name for n in provider.namespaces()] == ["weather"]
    session = await provider.open("c", SessionOptions())
    await do(session, "weather", "end", "{}")
    await until(lambda: provider.connection.listing and provider.connection.listing.name == "python")
    assert [(n.name, n.kind) for n in provider.namespaces()] == [("weather", ToolKind.MCP)]
    assert "first name stays" in caplog.text
    await provider.aclose()


@pytest.mark.parametrize("path", ["/sse", "/mcp", "/browser/mcp", "/browser/sse"])
async def test_our_browser_is_servable_to_other_engines(path: str) -> None:
    async with (
        ToolServer.from_spec("browser", ToolServerOptions(environ=ENVIRON)) as tools,
        running(http_app(tools.providers, "127.0.0.1")) as url,
    ):
        provider = McpProvider("", McpServerConfig(url=url + path))
        await provider.start()
        assert provider.unavailable is None
        (namespace,) = provider.namespaces()
        assert namespace == tools.namespaces()[0]
        alice = await provider.open("alice", SessionOptions())
        bob = await provider.open("bob", SessionOptions())
        assert "[0] dam" in (await alice.call(ToolCall("1", "browser", "search", '{"query": "dam"}'))).text
        opened = await alice.call(ToolCall("2", "browser", "open", '{"id": 0}'))
        assert opened.text.startswith("[1] The Velmora dam (https://dams.example/velmora)")
        lost = await bob.call(ToolCall("1", "browser", "open", '{"id": 0}'))
        assert lost.error is not None
        assert "No pages to access!" in lost.text
        await provider.aclose()


@pytest.mark.parametrize("path", ["/mcp", "/sse"])
async def test_another_engines_client_keeps_its_pages_and_sees_nobody_elses(path: str) -> None:
    """Plain clients of the `mcp` package, which name no conversation."""
    async with (
        ToolServer.from_spec("browser", ToolServerOptions(environ=ENVIRON)) as tools,
        running(http_app(tools.providers, "127.0.0.1")) as url,
        Client(sse_client(url + path) if path == "/sse" else url + path) as alice,
        Client(sse_client(url + path) if path == "/sse" else url + path) as bob,
    ):
        assert [tool.name for tool in (await alice.list_tools()).tools] == ["search", "open", "find"]
        await alice.call_tool("search", {"query": "dam"})
        opened = await alice.call_tool("open", {"id": 0})
        assert opened.content[0].text.startswith("[1] The Velmora dam")
        lost = await bob.call_tool("open", {"id": 0})
        assert (lost.is_error, "No pages to access!" in lost.content[0].text) == (True, True)


async def test_our_server_on_the_loopback_refuses_other_hosts() -> None:
    import httpx

    async with (
        ToolServer.from_spec("browser", ToolServerOptions(environ=ENVIRON)) as tools,
        running(http_app(tools.providers, "127.0.0.1")) as url,
        httpx.AsyncClient() as client,
    ):
        answer = await client.get(f"{url}/sse", headers={"host": "evil.example"})
        assert answer.status_code == 421


async def test_check_calls_every_tool_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPTOSS_BROWSER_DOCUMENTS", str(DOCUMENTS))
    server = {"command": sys.executable, "args": [str(EXAMPLE), "stdio"]}
    config = {
        "browser": True,
        "mcp": {
            "named": {**server, "check": {"tool": "add", "arguments": {"a": 1}}},
            "unmarked": server,
            "failing": {**server, "check": {"tool": "refuse"}},
            "down": {"url": "http://127.0.0.1:1/mcp"},
        },
    }
    file = tmp_path / "tools.yaml"
    file.write_text(json.dumps(config))
    rows = {row.name: row for row in await check_tools(str(file))}
    assert rows["browser"].problem is None
    assert (rows["named"].call, rows["named"].problem) == ('add {"a": 1}', None)
    assert rows["unmarked"].call.startswith("listed")
    assert rows["failing"].problem == "tool_failed: no such ticket"
    assert "ConnectError" in str(rows["down"].problem)


def test_the_check_command_has_a_table_and_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    from vllm_gptoss.tools.check import check

    monkeypatch.setenv("GPTOSS_BROWSER_DOCUMENTS", str(DOCUMENTS))
    app = typer.Typer()
    app.command()(check)
    passed = CliRunner().invoke(app, ["browser"])
    assert (passed.exit_code, "browser" in passed.output, "ok" in passed.output) == (0, True, True)
    assert CliRunner().invoke(app, ["127.0.0.1:1"]).exit_code == 1
    wrong = CliRunner().invoke(app, ["nonsense"])
    assert wrong.exit_code == 2
    assert "is not a tool server" in wrong.output


def test_a_browser_that_nobody_gave_a_search_is_no_failure_and_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import typer

    from vllm_gptoss.tools.check import check

    for name in ("GPTOSS_BROWSER_DOCUMENTS", "SEARXNG_URL", *(cls.key_variable for cls in API_BACKENDS.values())):
        monkeypatch.delenv(name, raising=False)
    app = typer.Typer()
    app.command()(check)
    checked = CliRunner().invoke(app, ["browser", "--json"])
    row = json.loads(checked.stdout)
    assert (checked.exit_code, row["problem"]) == (0, None)
    assert "GPTOSS_BROWSER_DOCUMENTS" in row["note"]
    assert "SEARXNG_URL, BRAVE_API_KEY" in row["note"]
    monkeypatch.setenv("GPTOSS_BROWSER_DOCUMENTS", "/nonexistent")  # what was set and does not work is a failure
    checked = CliRunner().invoke(app, ["browser", "--json"])
    assert (checked.exit_code, "does not exist" in json.loads(checked.stdout)["problem"]) == (1, True)


def test_several_processes_with_a_python_each_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for spec, processes, said in (("browser", 2, False), ("demo", 1, False), ("demo", 2, True)):
        caplog.clear()
        ToolServer.from_spec(spec, ToolServerOptions(environ=ENVIRON)).shared_by(processes)
        assert ("--api-server-count 1" in caplog.text) is said


async def only(known: set[asyncio.Task[Any]]) -> None:
    """Fails unless every task besides `known` ends; short ones of a connection (a POST, a listing) may be under way."""
    with contextlib.suppress(TimeoutError):
        await until(lambda: not asyncio.all_tasks() - known)
    assert asyncio.all_tasks() - known == set()


async def test_conversations_leave_nothing_behind() -> None:
    alone = asyncio.all_tasks()
    with example("sse") as (url, _):
        spec = f"browser,{url.split('/')[2]}"
        async with ToolServer.from_spec(spec, ToolServerOptions(environ=ENVIRON)) as server:
            before = asyncio.all_tasks()
            for number in range(30):
                browser = await session_of(server, "browser", f"c{number}")
                example_session = await session_of(server, "example", f"c{number}")
                await do(browser, "browser", "search", '{"query": "dam"}')
                await do(example_session, "example", "add", '{"a": 1}')
                await browser.aclose()
                await example_session.aclose()
            await only(before)
    await only(alone)
