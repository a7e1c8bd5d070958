"""Real MCP servers over three transports: every kind of result, and every way a server can fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support import waiting
from tests.support.example_server import PNG, build
from tests.support.servers import EXAMPLE, example, running
from vllm_gptoss.tools.mcp.provider import McpProvider, McpSession, namespace_name, tool_names
from vllm_gptoss.tools.mcp.settings import LABEL, McpServerConfig
from vllm_gptoss.tools.mcp.transport import Dialer
from vllm_gptoss.tools.protocol import Image, SessionOptions, Text, ToolCall, ToolKind, ToolResult

TRANSPORTS = ["stdio", "sse", "streamable_http"]


_shared: dict[str, str] = {}


@pytest.fixture(scope="session", autouse=True)
def _servers() -> Iterator[None]:
    """One HTTP server per transport for all tests that leave it as it was."""
    with contextlib.ExitStack() as stack:
        for transport in ("sse", "streamable_http"):
            _shared[transport] = stack.enter_context(example(transport))[0]
        yield


@contextlib.asynccontextmanager
async def connected(transport: str, *, fresh: bool = False, **options: Any) -> AsyncIterator[McpProvider]:
    """A started provider of the example server; over stdio, or if `fresh`, of a separate one."""
    with contextlib.ExitStack() as stack:
        if transport == "stdio":
            where: dict[str, Any] = {"command": sys.executable, "args": [str(EXAMPLE), "stdio"]}
        else:
            where = {"url": stack.enter_context(example(transport))[0] if fresh else _shared[transport]}
        provider = McpProvider(
            "", McpServerConfig(**{"timeout_s": 20.0, "connect_timeout_s": 20.0, **where, **options})
        )
        async with contextlib.aclosing(provider):
            await provider.start()
            yield provider


async def do(session: McpSession, tool: str, **arguments: Any) -> ToolResult:
    return await session.call(ToolCall("call_1", "example", tool, json.dumps(arguments)))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_kind_of_result_over_every_transport(transport: str) -> None:
    async with connected(transport, max_output_chars=1000) as provider:
        assert provider.unavailable is None
        (namespace,) = provider.namespaces()
        assert (namespace.name, namespace.kind, namespace.description) == ("example", ToolKind.MCP, "Tools for tests.")
        tools = {tool.name: tool for tool in namespace.tools}
        assert tools["add"].parameters["required"] == ["a"]
        assert not tools["unlisted"].include_in_prompt
        assert tools["add"].include_in_prompt
        session = await provider.open("conversation", SessionOptions())
        assert (await do(session, "add", a=2, b=3)).text == "5"
        assert (await do(session, "empty")).text == "(the tool returned no output)"
        picture = await do(session, "picture")
        assert picture.content == [Text("before"), Image("image/png", PNG, "[image, image/png]"), Text("after")]
        point = await do(session, "point")
        assert (json.loads(point.text), point.structured) == ({"x": 3, "y": 4}, {"x": 3, "y": 4})
        only = await do(session, "structured_only")
        assert (only.text, only.structured) == ('{"answer": 42}', {"answer": 42})
        huge = await do(session, "huge", chars=500_000)
        assert huge.content == [Text("x" * 1000), Text("[output truncated: 499000 of 500000 characters left out]")]
        failed = await do(session, "fail")
        assert failed.error.type == "tool_failed"
        refused = await do(session, "refuse")
        assert (refused.error.type, refused.text) == ("tool_failed", "no such ticket")
        assert "nope" in (await do(session, "nope")).text
        await session.aclose()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_call_that_hangs_is_given_up_and_cancelled_on_the_server(transport: str) -> None:
    async with connected(transport, timeout_s=1.0) as provider:
        session = await provider.open("c", SessionOptions())
        result = await do(session, "hang", note="slow")
        assert result.error.type == "timeout"
        assert (await do(session, "add", a=1)).text == "2"
        assert await until(session, "began,cancelled", "seen", note="slow") == "began,cancelled"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_cancelling_a_call_stops_it_on_the_server_and_leaves_the_session_usable(transport: str) -> None:
    async with connected(transport) as provider:
        session = await provider.open("c", SessionOptions())
        task = asyncio.create_task(do(session, "hang", note="cancel"))
        other = await provider.open("d", SessionOptions())
        assert await until(other, "began", "seen", note="cancel") == "began"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await until(session, "began,cancelled", "seen", note="cancel") == "began,cancelled"
        await other.aclose()
        await session.aclose()


async def until(session: McpSession, wanted: str, tool: str, **arguments: Any) -> str:
    """The text of a call, which is repeated until it is `wanted` or 30 s have passed."""
    limit = time.monotonic() + 30
    while (text := (await do(session, tool, **arguments)).text) != wanted and time.monotonic() < limit:
        await asyncio.sleep(0.02)
    return text


async def test_a_stdio_server_that_dies_mid_call_costs_that_call_and_comes_back() -> None:
    async with connected("stdio") as provider:
        session = await provider.open("c", SessionOptions())
        died = await do(session, "die")
        assert died.error.type == "tool_failed"
        assert "may have run" in died.text
        assert (await do(session, "add", a=1)).text == "2"


async def test_a_stdio_server_that_is_stuck_is_started_again() -> None:
    async with connected("stdio", timeout_s=1.0) as provider:
        session = await provider.open("c", SessionOptions())
        assert (await do(session, "block")).error is not None
        assert (await do(session, "add", a=1)).error is not None
        assert await until(session, "2", "add", a=1) == "2"


@pytest.mark.parametrize("transport", ["sse", "streamable_http"])
async def test_an_http_server_that_dies_mid_call_is_off_until_it_is_back(transport: str) -> None:
    with example(transport) as (url, _):
        provider = McpProvider("", McpServerConfig(url=url, connect_timeout_s=10.0))
        await provider.start()
        session = await provider.open("c", SessionOptions())
        died = await do(session, "die")
        assert died.error is not None
        gone = await do(session, "add", a=1)
        assert gone.error.type in ("unavailable", "tool_failed")
        assert provider.namespaces()  # what it offered is still known
    port = int(url.split(":")[2].split("/")[0])
    with example(transport, port):
        assert await until(session, "2", "add", a=1) == "2"
        await session.aclose()
        await provider.aclose()


async def test_a_server_down_at_start_is_found_when_it_comes_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    provider = McpProvider("later", McpServerConfig(url=f"http://127.0.0.1:{port}/mcp"))
    await provider.start()
    assert provider.unavailable is not None
    assert provider.namespaces() == ()
    with example("streamable_http", port):
        await waiting.until(lambda: not provider.unavailable)
        assert provider.namespaces()[0].name == "later"
        await provider.aclose()


async def test_a_server_that_accepts_and_says_nothing_is_given_up() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for path in ("mcp", "sse"):
        provider = McpProvider("", McpServerConfig(url=f"http://127.0.0.1:{port}/{path}", connect_timeout_s=0.3))
        await provider.start()
        assert provider.unavailable is not None
        await provider.aclose()
    server.close()


@pytest.mark.parametrize("command", ["/nonexistent/server", "false"])
async def test_a_command_that_is_no_server_turns_one_tool_off(command: str) -> None:
    provider = McpProvider("", McpServerConfig(command=command, connect_timeout_s=5.0))
    await provider.start()
    assert provider.unavailable is not None
    session = await provider.open("c", SessionOptions())
    result = await do(session, "add", a=1)
    assert result.error.type == "unavailable"
    await provider.aclose()


@pytest.mark.parametrize("transport", ["stdio", "streamable_http"])
async def test_a_tool_that_appears_is_offered_without_asking(transport: str) -> None:
    async with connected(transport, fresh=True) as provider:
        session = await provider.open("c", SessionOptions())
        await do(session, "grow")
        await waiting.until(lambda: "grown" in {t.name for t in session.namespaces[0].tools})
        assert (await do(session, "grown")).text == "grown"


async def test_tools_are_filtered_by_operator_and_request() -> None:
    async with connected("streamable_http", allowed_tools=["add", "who", "missing"]) as provider:
        assert [tool.name for tool in provider.namespaces()[0].tools] == ["add", "who"]
        session = await provider.open("c", SessionOptions(allowed_tools=["who"]))
        assert [tool.name for tool in session.namespaces[0].tools] == ["who"]


async def test_conversations_have_names_that_tell_a_server_nothing() -> None:
    async with connected("streamable_http") as provider:
        first = await provider.open("alice@example.org", SessionOptions())
        second = await provider.open("bob@example.org", SessionOptions())
        names = {(await do(first, "who")).text, (await do(second, "who")).text}
        assert len(names) == 2
        assert (await do(first, "who")).text in names
        assert not any("example.org" in name for name in names)


async def test_an_sse_server_gets_a_connection_per_conversation_named_as_upstream_does() -> None:
    async with connected("sse") as provider:
        assert provider.per_conversation
        first = await provider.open("alice", SessionOptions())
        second = await provider.open("bob", SessionOptions())
        names = [(await do(session, "header", name="x-session-id")).text for session in (first, second, first)]
        assert names[0] == names[2] != names[1]
        await first.aclose()
        await second.aclose()


async def test_headers_and_tokens_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_TOKEN", "tok-secret")
    monkeypatch.setenv("TENANT", "t1")
    options = {"authorization_env": "MCP_TOKEN", "headers": {"X-Tenant": "id-${TENANT}"}}
    async with connected("streamable_http", **options) as provider:
        session = await provider.open("c", SessionOptions())
        assert (await do(session, "header", name="authorization")).text == "Bearer tok-secret"
        assert (await do(session, "header", name="x-tenant")).text == "id-t1"
        assert "tok-secret" not in repr(provider.config) + repr(provider._dialer)


async def test_a_missing_variable_turns_the_tool_off_and_is_named() -> None:
    config = McpServerConfig(url="http://127.0.0.1:1/mcp", authorization_env="NOT_SET_ANYWHERE")
    provider = McpProvider("x", config)
    await provider.start()
    assert "NOT_SET_ANYWHERE is not set" in str(provider.unavailable)
    await provider.aclose()


async def test_a_secret_in_an_address_is_in_no_word_about_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async def closed(request: Request) -> Response:
        return Response(status_code=403)

    async with running(Starlette(routes=[Route("/{p:path}", closed, methods=["GET", "POST"])])) as url:
        where = f"{url.replace('127.0.0.1', 'user:SECRET@127.0.0.1')}/s/${{KEY}}/mcp?key=SECRET"
        for address in (where, where.replace("/mcp", "/sse")):
            config = McpServerConfig(url=address, connect_timeout_s=5.0)
            provider = McpProvider("", config, Dialer(config, environ={"KEY": "SECRET"}))
            await provider.start()
            assert "403" in str(provider.unavailable)
            ours = [r.getMessage() for r in caplog.records if r.name.startswith("vllm_gptoss")]
            assert ours
            assert "SECRET" not in f"{ours}{provider.unavailable}{provider.name}"
            await provider.aclose()


async def test_a_stdio_server_sees_no_secret_of_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    script = tmp_path / "env_server.py"
    script.write_text(
        "import os\nfrom mcp.server.mcpserver import MCPServer\ns = MCPServer('env', log_level='CRITICAL')\n"
        "@s.tool(structured_output=False)\ndef env() -> str:\n    return repr(dict(os.environ))\n"
        "if __name__ == '__main__':\n    s.run()\n"
    )
    config = McpServerConfig(command=sys.executable, args=[str(script)], env={"WANTED": "${HOME}"})
    provider = McpProvider("", config)
    await provider.start()
    session = await provider.open("c", SessionOptions())
    seen = (await session.call(ToolCall("1", "env", "env", "{}"))).text
    assert "sk-mine" not in seen
    assert "WANTED" in seen
    await provider.aclose()


async def test_a_screenshot_of_megabytes_comes_through_and_an_answer_without_end_costs_its_call() -> None:
    async with connected("streamable_http", fresh=True) as provider:
        session = await provider.open("c", SessionOptions())
        photo = await do(session, "photo", size=4_000_000)
        assert [len(part.data) for part in photo.content if isinstance(part, Image)] == [4_000_000]
        endless = await do(session, "huge", chars=20_000_000)
        assert endless.error is not None
        assert (await do(session, "add", a=1)).text == "2"


async def test_an_answer_in_one_body_is_bounded_too(caplog: pytest.LogCaptureFixture) -> None:
    app = build().streamable_http_app(json_response=True)
    async with running(app) as url:
        provider = McpProvider("", McpServerConfig(url=f"{url}/mcp"))
        await provider.start()
        session = await provider.open("c", SessionOptions())
        assert len((await do(session, "huge", chars=3_000_000)).text) < 70_000
        endless = await do(session, "huge", chars=20_000_000)
        assert endless.error is not None
        assert "the answer is larger than 16777216 bytes" in caplog.text
        assert (await do(session, "add", a=1)).text == "2"
        await provider.aclose()


async def test_a_tool_whose_name_the_model_cannot_write_is_offered_under_one_it_can() -> None:
    async with connected("streamable_http", require_approval={"never": ["odd name (v2)"]}) as provider:
        (namespace,) = provider.namespaces()
        assert "odd_name_v2_" in [tool.name for tool in namespace.tools]
        assert not provider.needs_approval("odd_name_v2_")
        session = await provider.open("c", SessionOptions())
        assert (await do(session, "odd_name_v2_")).text == "odd"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("my server!", "my_server"), ("functions", "mcp_functions"), ("assistant", "mcp_assistant"), ("3d", "mcp_3d"),
        ("\u30c4\u30fc\u30eb", "mcp"), ("", "mcp"), ("python", "mcp_python"),
        ("x" * 300, "x" * 128), ("-a-", "mcp_-a-"),
        ("a<|end|>b", "a_end_b"), ("git.hub", "git_hub"),
    ],
)  # fmt: skip
def test_whatever_a_server_calls_itself_becomes_a_name_that_can_be_called(said: str, name: str) -> None:
    assert namespace_name(said) == name
    assert LABEL.fullmatch(name)


@pytest.mark.parametrize(("kind", "name"), [("mcp", "mcp_python"), ("auto", "python"), ("python", "python")])
def test_only_what_is_no_plain_mcp_server_may_be_called_python(kind: Any, name: str) -> None:
    assert McpProvider("", McpServerConfig(command="python", kind=kind)).name == name


def test_tools_keep_names_of_their_own_when_odd_ones_meet() -> None:
    own = ["a b", "a_b", "a!b", "a b", "", "..", "repo/read.file", "x" * 200]
    names = tool_names(own)
    assert list(names)[:5] == ["a_b", "a_b_2", "a_b_3", "tool", "tool_2"]
    assert list(names.values())[:5] == ["a b", "a_b", "a!b", "", ".."]
    assert names["repo/read.file"] == "repo/read.file"
    assert max(map(len, names)) == 128


async def test_many_calls_at_once_share_one_connection() -> None:
    async with connected("streamable_http") as provider:
        sessions = [await provider.open(f"c{n}", SessionOptions()) for n in range(20)]
        results = await asyncio.gather(*(do(session, "add", a=n) for n, session in enumerate(sessions)))
        assert [result.text for result in results] == [str(n + 1) for n in range(20)]


async def test_a_server_of_2024_is_spoken_to_in_its_version() -> None:
    script = str(EXAMPLE.parent / "legacy_server.py")
    provider = McpProvider("", McpServerConfig(command=sys.executable, args=[script], connect_timeout_s=20.0))
    await provider.start()
    assert provider.unavailable is None
    assert provider.connection.listing.protocol == "2024-11-05"
    (namespace,) = provider.namespaces()
    assert (namespace.name, namespace.description) == ("old_server", "Old.")
    assert [(tool.name, tool.include_in_prompt) for tool in namespace.tools] == [("first", True), ("second", False)]
    assert namespace.tools[0].annotations == {"readOnlyHint": True}
    session = await provider.open("c", SessionOptions())
    assert (await session.call(ToolCall("1", "old_server", "second", ""))).text == "called second"
    await provider.aclose()
