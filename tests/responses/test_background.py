"""Responses without a listener: followed, resumed, cancelled, and told about when their server died."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

from tests.responses import fakes
from tests.responses.conftest import MODEL, Start
from tests.responses.events import check_stream, kinds, read
from tests.responses.test_create import HELLO
from tests.responses.test_tools import INTERPRETER, PYTHON
from vllm_gptoss.tools.base import ToolCall, ToolResult

LONG = "<|channel|>final<|message|>" + "word " * 400 + "<|return|>"


def follow(http: httpx.Client, identifier: str, after: int | None = None) -> list[dict[str, Any]]:
    query = "?stream=true" + (f"&starting_after={after}" if after is not None else "")
    with connect_sse(http, "GET", f"/responses/{identifier}{query}") as source:
        return read(source.iter_sse())


def test_a_background_response_is_queued_runs_and_ends(start: Start) -> None:
    server = start(HELLO)
    with server.http() as http:
        made = http.post("/responses", json={"model": MODEL, "input": "hi", "background": True}).json()
        assert made["status"] == "queued"
        events = follow(http, made["id"])
        check_stream(events)
        assert kinds(events)[:3] == ["created", "queued", "in_progress"]
        assert http.get(f"/responses/{made['id']}").json() == events[-1]["response"]


def test_a_broken_stream_is_resumed_without_loss(start: Start) -> None:
    server = start(LONG, rate=400.0)
    with server.http() as http:
        body = {"model": MODEL, "input": "hi", "background": True, "stream": True}
        first = []
        with connect_sse(http, "POST", "/responses", json=body) as source:
            for sse in source.iter_sse():
                first.append(sse.json())
                if len(first) == 20:
                    break  # the client goes; the response does not
        identifier = first[0]["response"]["id"]
        assert http.get(f"/responses/{identifier}").json()["status"] == "in_progress"
        rest = follow(http, identifier, first[-1]["sequence_number"])
        check_stream(first + rest)
        assert server.engine.aborted == 0


def test_cancel_stops_the_engine_and_ends_every_follower(start: Start) -> None:
    server = start(LONG, rate=50.0)
    with server.http() as http, server.http() as other:
        made = http.post("/responses", json={"model": MODEL, "input": "hi", "background": True}).json()
        followed: list[dict[str, Any]] = []
        follower = threading.Thread(target=lambda: followed.extend(follow(other, made["id"])))
        follower.start()
        cancelled = http.post(f"/responses/{made['id']}/cancel").raise_for_status().json()
        assert cancelled["status"] == "cancelled"
        follower.join(10)
        assert not follower.is_alive()
        assert followed[-1]["response"]["status"] == "cancelled"
        assert http.post(f"/responses/{made['id']}/cancel").json()["status"] == "cancelled"
    assert server.engine.running == 0


def test_a_tool_that_raises_does_not_hang_a_background_stream(start: Start) -> None:
    """[ran] upstream leaves such a response `queued` for ever and its stream open."""

    async def die(call: ToolCall) -> ToolResult:
        raise RuntimeError("boom")

    server = start(PYTHON, HELLO, providers=[fakes.python(die)])
    with server.http() as http:
        body = {"model": MODEL, "input": "hi", "background": True, "tools": [INTERPRETER]}
        made = http.post("/responses", json=body).json()
        assert follow(http, made["id"])[-1]["response"]["status"] == "completed"


def test_engine_death_ends_a_background_stream(start: Start) -> None:
    server = start(LONG)
    server.engine.fail_after = 5
    with server.http() as http:
        made = http.post("/responses", json={"model": MODEL, "input": "hi", "background": True}).json()
        events = follow(http, made["id"])
        assert events[-1]["type"] == "response.failed"
        assert http.get(f"/responses/{made['id']}").json()["status"] == "failed"


def test_another_server_can_follow_and_cancel(start: Start) -> None:
    first = start(LONG, rate=50.0)
    second = start(HELLO)
    with first.http() as http, second.http() as other:
        made = http.post("/responses", json={"model": MODEL, "input": "hi", "background": True}).json()
        cancelled = other.post(f"/responses/{made['id']}/cancel").raise_for_status().json()
        assert cancelled["status"] == "cancelled"
        assert follow(other, made["id"])[-1]["response"]["status"] == "cancelled"
    assert first.engine.running == 0


def test_foreground_responses_cannot_be_cancelled_or_streamed_again(start: Start) -> None:
    server = start(HELLO)
    with server.http() as http:
        made = http.post("/responses", json={"model": MODEL, "input": "hi"}).json()
        assert http.post(f"/responses/{made['id']}/cancel").status_code == 400
        assert http.get(f"/responses/{made['id']}?stream=true").status_code == 400


@pytest.mark.parametrize("key", ["bob"])
def test_background_streams_are_private(start: Start, key: str) -> None:
    server = start(HELLO)
    with server.http() as http, server.http(key) as other:
        made = http.post("/responses", json={"model": MODEL, "input": "hi", "background": True}).json()
        assert other.get(f"/responses/{made['id']}?stream=true").status_code == 404


def test_a_cancel_from_another_server_stops_a_hanging_tool(start: Start) -> None:
    async def hang(call: ToolCall) -> ToolResult:
        await asyncio.Event().wait()
        raise AssertionError

    tool = fakes.python(hang)
    first = start(PYTHON, providers=[tool])
    second = start(HELLO)
    with first.http() as http, second.http() as other:
        body = {"model": MODEL, "input": "hi", "background": True, "tools": [INTERPRETER]}
        made = http.post("/responses", json=body).json()
        assert other.post(f"/responses/{made['id']}/cancel").raise_for_status().json()["status"] == "cancelled"
    assert tool.cancelled == 1
