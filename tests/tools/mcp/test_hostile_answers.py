"""MCP servers with answers that would stop the server. Every answer is bounded; a missing guard fails the test."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import time
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.loop_watch import shortest_pause
from tests.support.servers import running
from vllm_gptoss.tools.confined import pool
from vllm_gptoss.tools.confined.json_tree import json_problem, may_exceed
from vllm_gptoss.tools.mcp import bounds, relay
from vllm_gptoss.tools.mcp.pace import Pace
from vllm_gptoss.tools.mcp.provider import McpProvider
from vllm_gptoss.tools.mcp.settings import McpServerConfig
from vllm_gptoss.tools.protocol import SessionOptions, ToolCall, ToolResult

PAUSE_S = 0.1
FLOOD_PAUSE_S = 0.3
"""Typically 0.03, in a worker with other tests' threads up to 0.2; unlimited messages stopped the loop for 1.3 s."""

STDIO = """
import json, sys
def say(message): print(json.dumps(message), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    answer = {"jsonrpc": "2.0", "id": asked.get("id")}
    if asked["method"] == "initialize":
        say(answer | {"result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                                 "serverInfo": {"name": "odd", "version": "1"}}})
    elif asked["method"] == "tools/list":
        say(answer | {"result": {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}})
    elif asked["method"] == "tools/call":
        kind = asked["params"]["arguments"]["kind"]
        if kind == "large":  # 64 MiB in one line
            sys.stdout.write(json.dumps(answer)[:-1] + ', "result": {"content": [{"type": "text", "text": "')
            for _ in range(64): sys.stdout.write("x" * (1 << 20))
            sys.stdout.write('"}]}}\\n'); sys.stdout.flush()
        elif kind == "tree":
            tree = ', "result": {"content": [], "x": [' + "[]," * 2_000_000 + "[]]}}\\n"
            sys.stdout.write(json.dumps(answer)[:-1] + tree)
            sys.stdout.flush()
        else:
            say(answer | {"result": {"content": [{"type": "text", "text": kind}]}})
    elif "id" in asked:
        say(answer | {"error": {"code": -32601, "message": "no"}})
"""


async def call(provider: McpProvider, kind: str) -> ToolResult:
    session = await provider.open("c", SessionOptions())
    return await session.call(ToolCall("1", "odd", "t", json.dumps({"kind": kind})))


@pytest.mark.alone
@pytest.mark.parametrize(("kind", "said"), [("large", "larger than"), ("tree", "more than 100000 values")])
async def test_a_line_that_must_not_be_parsed_is_an_error_and_nothing_is_lost(
    tmp_path: Path, kind: str, said: str
) -> None:
    """64 MiB in one line stopped the event loop for 29 s."""
    (tmp_path / "server.py").write_text(STDIO)
    config: dict[str, Any] = {"command": sys.executable, "args": [str(tmp_path / "server.py")], "timeout_s": 60.0}
    provider = McpProvider("odd", McpServerConfig(**config))
    await provider.start()
    try:
        assert provider.unavailable is None
        pause, result = await shortest_pause(lambda: call(provider, kind), PAUSE_S)
        assert result.error is not None
        assert said in result.text
        assert pause < PAUSE_S
        assert (await call(provider, "hello")).text == "hello"
    finally:
        await provider.aclose()


FLOOD = """
import json, sys, threading, time
kind = sys.argv[1]
def say(message): sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + chr(10)); sys.stdout.flush()
FORM = {"message": "m", "requestedSchema": {"type": "object", "properties": {}}}
SENT = {
    "pings": {"id": "p", "method": "ping"},
    "forms": {"id": "f", "method": "elicitation/create", "params": FORM},
    "changes": {"method": "notifications/tools/list_changed"},
    "logs": {"method": "notifications/message", "params": {"level": "info", "data": "x"}},
    "large": {"method": "notifications/message", "params": {"level": "info", "data": [[]] * 20000}},
}
def flood():
    end = time.monotonic() + 20
    while time.monotonic() < end: say(SENT[kind])
TOOLS = [{"name": f"t{n}", "description": "d" * 100, "inputSchema": {"type": "object"}} for n in range(2000)]
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("method") == "initialize":
        say({"id": asked["id"], "result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                                           "serverInfo": {"name": "odd", "version": "1"}}})
    elif asked.get("method") == "tools/list":
        say({"id": asked["id"], "result": {"tools": TOOLS if kind == "changes" else TOOLS[:1]}})
        threading.Thread(target=flood, daemon=True).start()
    elif "id" in asked and "method" in asked:
        say({"id": asked["id"], "error": {"code": -32601, "message": "no"}})
"""


@pytest.mark.parametrize("kind", ["pings", "forms", "changes", "logs", "large"])
async def test_a_server_that_sends_without_end_is_slowed_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Pings took half of a core for good, and 2,000 tools that changed all the time stopped the loop for 1.3 s."""
    monkeypatch.setattr("vllm_gptoss.tools.mcp.transport._PATIENCE_S", 2.0)
    (tmp_path / "server.py").write_text(FLOOD)
    command: dict[str, Any] = {"command": sys.executable, "args": [str(tmp_path / "server.py"), kind]}

    async def flooded() -> None:
        caplog.clear()
        provider = McpProvider("odd", McpServerConfig(**command, max_unasked_per_s=20.0, connect_timeout_s=30.0))
        began = time.process_time()
        async with asyncio.timeout(60):
            await provider.start()
            while "sends more than 20 messages a second unasked" not in caplog.text:
                await asyncio.sleep(0.1)
        used = time.process_time() - began
        await provider.aclose()
        assert used < 3.0, used

    assert (await shortest_pause(flooded, FLOOD_PAUSE_S))[0] < FLOOD_PAUSE_S


@pytest.mark.parametrize(("sent", "waits"), [(99, False), (100, False), (101, True)])
async def test_ten_seconds_worth_of_messages_may_come_at_once(sent: int, waits: bool) -> None:
    pace = Pace(10.0, 60.0)
    message = SimpleNamespace(message=SimpleNamespace(method="notifications/message", params=None))
    async with asyncio.timeout(20):
        began = time.monotonic()
        for _ in range(sent):
            await pace.take(message)
        assert (time.monotonic() - began > 0.05) is waits


def test_the_relay_keeps_lines_whole_whatever_their_pieces(tmp_path: Path) -> None:
    lines = [b'{"id": 1}', b"", b"x" * 70_000, b'{"x": "last"}']
    refused = [b'{"id":"a", "x": "%s"}' % (b"y" * 300_000), b'{"id": 7, "x": %s}' % (b"[" * 101 + b"]" * 101)]
    (tmp_path / "out").write_bytes(b"\n".join([*lines[:3], *refused, lines[3]]))
    with (tmp_path / "out").open("rb") as file:
        got = list(relay.lines(file.fileno(), 100_000))
    assert got[:3] == [line + b"\n" for line in lines[:3]]
    for line, (number, said) in zip(got[3:5], [("a", "larger than 100000"), (7, "nested more than")], strict=True):
        answer = json.loads(line)
        assert (answer["id"], said in answer["error"]["message"]) == (number, True)
    assert got[5] == b'{"x": "last"}\n'


TREE = b"[" + b"[]," * 3_000_000 + b"[]]"
BOMBS: dict[str, tuple[bytes, str, str]] = {
    "gzip": (b" " * (64 << 20), "gzip", "larger than"),
    "twice": (b" " * (64 << 20), "gzip, gzip", "encoded more than once"),
    "tree": (TREE, "", "more than 100000 values"),
    "deep": (b"[" * 200_000 + b"]" * 200_000, "", "values|nested"),
    "packed tree": (TREE, "gzip", "more than 100000 values"),
}
"""What unfolds, its encodings, and the error."""


@cache
def packed(name: str, kind: str) -> bytes:
    data, encoding, _ = BOMBS[name]
    body = b"event: message\ndata: " + data + b"\n\n" if kind else data
    for _ in range(encoding.count("gzip")):
        body = gzip.compress(body, 1)
    return body


@pytest.fixture
async def client() -> AsyncIterator[tuple[httpx2.AsyncClient, str]]:
    async def answer(request: Request) -> Response:
        name, kind = request.query_params["name"], request.query_params.get("kind", "")
        headers = {"content-encoding": BOMBS[name][1]} if BOMBS[name][1] else None
        return Response(packed(name, kind), headers=headers, media_type=kind or "application/json")

    async with running(Starlette(routes=[Route("/", answer)])) as url:
        await pool().start()
        async with httpx2.AsyncClient(event_hooks={"response": [bounds.bound]}) as client:
            yield client, url


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["", "text/event-stream"])
@pytest.mark.parametrize("name", BOMBS)
async def test_an_answer_is_counted_as_what_it_unfolds_to(
    client: tuple[httpx2.AsyncClient, str], name: str, kind: str
) -> None:
    """700 kB were 3.5 GiB, and 15 MiB of `[],[]` 954 MiB."""
    if kind and name == "twice":
        pytest.skip("the body is the same")
    http, url = client
    packed(name, kind)

    async def refused() -> None:
        with pytest.raises(httpx2.ReadError, match=BOMBS[name][2]):
            await http.get(url, params={"name": name, "kind": kind})

    assert (await shortest_pause(refused, PAUSE_S))[0] < PAUSE_S


@pytest.mark.parametrize(
    ("data", "fits"),
    [
        (b'{"a": "%s"}' % (b"[{,:" * 1_000_000), True),
        (b'["%s"]' % (rb"\"[,\\" * 300_000), True),
        (b"[" * 101 + b"]" * 101, False),
        (b"[" + b"1," * 100_001 + b"1]", False),
        (b"not json", True),
        (b'"' + b"[" * 1000, True),
    ],
)
def test_only_what_builds_a_tree_counts(data: bytes, fits: bool) -> None:
    assert (json_problem(data) is None) == fits


def test_an_answer_at_its_limit_of_values_is_read_at_once() -> None:
    assert [may_exceed(b"[1, 2]", nodes) for nodes in (1, 2, 3)] == [True, False, False]
