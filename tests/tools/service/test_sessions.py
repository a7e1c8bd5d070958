"""MCP sessions of `tools serve`: one key neither uses up those of others, nor reaches into them."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from tests.support.loop_watch import watched
from tests.support.servers import running
from vllm_gptoss.tools.serve import http_app, serve
from vllm_gptoss.tools.server import ToolServer, ToolServerOptions
from vllm_gptoss.tools.service.access import VARIABLE, load_keys
from vllm_gptoss.tools.service.sessions import SessionLimits, Sessions, _nothing, _unread

ALICE, BOB, CAROL = ("key of alice 0123456789", "key of bob 0123456789", "key of carol 0123456789")
ENVIRON = {"GPTOSS_BROWSER_DOCUMENTS": str(Path(__file__).parents[1] / "browser" / "documents")}
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}


@pytest.fixture(params=[f"{ALICE},{BOB},{CAROL}"], ids=["keys"])
async def http(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    keys = load_keys(None, {VARIABLE: request.param}) if request.param else None
    async with (
        ToolServer.from_spec("browser", ToolServerOptions(environ=ENVIRON)) as tools,
        running(http_app(tools.providers, "127.0.0.1", keys, SessionLimits(per_caller=3, total=5))) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        yield client


def headers(key: str, session: str = "") -> dict[str, str]:
    found = {"authorization": key and f"Bearer {key}", "accept": "application/json, text/event-stream"}
    return found | ({"mcp-session-id": session} if session else {})


async def opened(http: httpx.AsyncClient, key: str) -> str:
    answer = await http.post("/mcp", json=INITIALIZE, headers=headers(key))
    assert answer.status_code == 200, answer.text
    return str(answer.headers["mcp-session-id"])


async def lives(http: httpx.AsyncClient, key: str, session: str) -> bool:
    ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
    answer = await http.post("/mcp", json=ping, headers=headers(key, session))
    assert answer.status_code in (200, 404)
    return answer.status_code == 200


async def test_a_session_is_its_keys_own(http: httpx.AsyncClient) -> None:
    session = await opened(http, ALICE)
    for method in ("GET", "POST", "DELETE"):
        answer = await http.request(method, "/mcp", headers=headers(BOB, session), json=INITIALIZE)
        assert answer.status_code == 404, method
    assert await lives(http, ALICE, session)
    assert (await http.delete("/mcp", headers=headers(ALICE, session))).status_code == 200
    assert not await lives(http, ALICE, session)


async def test_a_refused_opening_request_leaves_no_session(http: httpx.AsyncClient) -> None:
    """The 406 carries a session id. The `mcp` package ends that session, so it needs no place of the key's."""
    kept = [await opened(http, ALICE) for _ in range(3)]
    for _ in range(4):
        answer = await http.post("/mcp", json=INITIALIZE, headers=headers(BOB) | {"accept": "text/plain"})
        assert answer.status_code == 406
        for key in (BOB, ALICE):
            assert not await lives(http, key, answer.headers["mcp-session-id"])
    assert [await lives(http, ALICE, each) for each in kept] == [True] * 3
    await opened(http, BOB)


async def test_a_stream_is_its_keys_own(http: httpx.AsyncClient) -> None:
    async with http.stream("GET", "/sse", headers=headers(ALICE)) as stream:
        lines = stream.aiter_lines()
        path = ""
        while not path.startswith("/"):
            path = (await anext(lines)).removeprefix("data: ")
        assert (await http.post(path, json=INITIALIZE, headers=headers(BOB))).status_code == 404
        assert (await http.post(path, json=INITIALIZE, headers=headers(ALICE))).status_code == 202


async def test_at_its_limit_a_keys_longest_unused_session_ends(http: httpx.AsyncClient) -> None:
    other = await opened(http, BOB)
    first, second, third = [await opened(http, ALICE) for _ in range(3)]
    assert await lives(http, ALICE, first)  # used now
    fourth = await opened(http, ALICE)
    assert [await lives(http, ALICE, each) for each in (first, second, third, fourth)] == [True, False, True, True]
    assert await lives(http, BOB, other)


@pytest.mark.parametrize("http", [""], indirect=True, ids=["no keys"])
async def test_without_keys_the_longest_unused_session_ends_too(http: httpx.AsyncClient) -> None:
    """The request that ends it names the host: others are refused on the loopback."""
    sessions = [await opened(http, "") for _ in range(6)]
    assert [await lives(http, "", each) for each in sessions] == [False] + [True] * 5


async def test_at_the_limit_of_all_the_key_with_most_gives_way(http: httpx.AsyncClient) -> None:
    sessions = [await opened(http, ALICE) for _ in range(3)] + [await opened(http, BOB)]
    last = [await opened(http, CAROL) for _ in range(2)]
    assert [await lives(http, ALICE, each) for each in sessions[:3]] == [False, True, True]
    assert await lives(http, BOB, sessions[3])
    assert [await lives(http, CAROL, each) for each in last] == [True, True]


async def test_streams_beyond_the_limit_are_refused_and_the_limit_is_named(http: httpx.AsyncClient) -> None:
    open_streams = [http.stream("GET", "/sse", headers=headers(ALICE)) for _ in range(3)]
    for stream in open_streams:
        assert (await stream.__aenter__()).status_code == 200
    for path, method in (("/sse", "GET"), ("/mcp", "POST")):
        answer = await http.request(method, path, headers=headers(ALICE), json=INITIALIZE)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
        assert "3 sessions of this key are open (--caller-sessions)" in answer.text
    await opened(http, BOB)
    for stream in open_streams:
        await stream.__aexit__(None, None, None)


def test_the_command_has_the_documented_limits() -> None:
    """It allowed twice as many sessions in total."""
    given = inspect.signature(serve).parameters
    assert SessionLimits(given["caller_sessions"].default, given["max_sessions"].default) == SessionLimits(2000, 4000)


@pytest.mark.parametrize(("version", "running_at_once"), [("2026-07-28", 6), ("2025-11-25", 3)])
async def test_only_requests_that_open_a_session_wait_for_their_turn(version: str, running_at_once: int) -> None:
    """A call of a protocol without sessions is one request, which runs for minutes."""
    started, end = asyncio.Semaphore(0), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        started.release()
        await end.wait()

    named = [(b"mcp-protocol-version", version.encode())]
    scope = {"type": "http", "method": "POST", "path": "/mcp", "headers": named}
    sessions = Sessions(app, SessionLimits())
    calls = [asyncio.create_task(sessions(scope, _nothing, _unread)) for _ in range(6)]
    async with asyncio.timeout(10):
        for _ in range(running_at_once):
            await started.acquire()
    await asyncio.sleep(0)
    assert started.locked()
    end.set()
    await asyncio.gather(*calls)


async def test_a_flood_of_sessions_delays_no_other_key(http: httpx.AsyncClient) -> None:
    session = await opened(http, BOB)

    async def took() -> float:
        began = time.monotonic()
        assert await lives(http, BOB, session)
        return time.monotonic() - began

    async def flood() -> None:
        while True:
            await opened(http, ALICE)

    alone = min([await took() for _ in range(10)])
    async with watched() as loop:
        tasks = [asyncio.create_task(flood()) for _ in range(8)]
        await asyncio.sleep(0.5)  # until it has begun
        beside = min([await took() for _ in range(10)])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert loop.longest < 0.1
    assert beside < alone + 0.1, (alone, beside)
