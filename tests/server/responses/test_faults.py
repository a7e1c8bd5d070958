"""After a fault the response has a clear end, no task keeps running, and every reported response is stored."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

from tests.support.responses import fakes
from tests.support.responses.events import check_stream, stream
from tests.support.responses.process import killable
from tests.support.responses.server import MODEL, Running, Start, harmony
from tests.support.responses.turns import CALL, HELLO, INTERPRETER, LONG, PYTHON, WEATHER
from tests.support.waiting import soon
from vllm_gptoss.server.responses.transport import event_stream
from vllm_gptoss.tools.protocol import ToolCall, ToolResult


def test_a_disconnect_stops_a_stream_within_a_second(start: Start) -> None:
    server = start(LONG, rate=20.0)
    with (
        server.http() as http,
        connect_sse(http, "POST", "/responses", json={"model": MODEL, "input": "hi", "stream": True}) as source,
    ):
        events = source.iter_sse()
        next(events)
        soon(lambda: server.engine.running == 1)
    soon(lambda: server.engine.running == 0)
    assert server.engine.aborted == 1


def test_a_disconnect_stops_an_unstreamed_response_within_a_second(start: Start) -> None:
    server = start(LONG, rate=20.0)
    with pytest.raises(httpx.ReadTimeout), server.http() as http:
        http.post("/responses", json={"model": MODEL, "input": "hi"}, timeout=0.5)
    soon(lambda: server.engine.running == 0)


def test_a_disconnect_stops_a_running_tool_within_a_second(start: Start) -> None:
    async def hang(call: ToolCall) -> ToolResult:
        await asyncio.Event().wait()
        raise AssertionError

    tool = fakes.python(hang)
    server = start(PYTHON, providers=[tool])
    with (
        server.http() as http,
        connect_sse(
            http, "POST", "/responses", json={"model": MODEL, "input": "hi", "stream": True, "tools": [INTERPRETER]}
        ) as source,
    ):
        for sse in source.iter_sse():
            if sse.event.endswith("interpreting"):
                break
    soon(lambda: tool.cancelled == 1 and tool.closed == 1)


def test_engine_death_is_a_failed_response(start: Start) -> None:
    server = start(LONG)
    server.engine.fail_after = 7
    with server.http() as http:
        conversation = http.post("/conversations", json={}).json()["id"]
        for stores in (True, False):
            events = stream(http, {"model": MODEL, "input": "hi", "conversation": conversation, "store": stores})
            assert events[-1]["type"] == "response.failed"
            assert http.get(f"/conversations/{conversation}/items").json()["data"] == [], "a failed turn is no history"
        assert events[-1]["response"]["error"]["code"] == "server_error"
        plain = http.post("/responses", json={"model": MODEL, "input": "hi"})
        assert plain.status_code == 500
        assert plain.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    "text",
    [
        "Hello, no header at all",
        "<|channel|>final<|channel|>final<|message|>Hello<|return|>",
        "<|start|>assistant<|start|>assistant<|channel|>final<|message|>Hello<|return|>",
        "<|channel|>nonsense<|message|>Hello<|return|>",
        " to=functions.get_weather to=functions.get_weather<|channel|>commentary json<|message|>{}Hello<|call|>",
        "<|channel|>analysis<|message|>x<|end|><|channel|>final<|message|>Hello<|return|>",
        "<|channel|>commentary to=functions.unknown json<|message|>Hello<|call|>",
        "<|channel|>final<|message|>Hello<|channel|>",
    ],
)
def test_malformed_harmony_loses_nothing(start: Start, text: str) -> None:
    server = start(text)
    with server.http() as http:
        response = stream(http, {"model": MODEL, "input": "hi", "tools": [WEATHER]})[-1]["response"]
    assert "Hello" in json.dumps(response["output"])


def test_every_cut_of_an_answer_is_a_consistent_response(start: Start) -> None:
    """[ran] upstream: items that are `completed` in the stream and `incomplete` at its end, headers in the text."""
    whole = harmony("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + CALL)
    server = start(lambda prompt: whole)
    with server.http() as http:
        for budget in range(1, len(whole) + 1):
            body = {"model": MODEL, "input": "hi", "tools": [WEATHER], "max_output_tokens": budget}
            response = stream(http, body)[-1]["response"]
            assert response["usage"]["output_tokens"] == budget
            if budget < len(whole):
                assert response["status"] == "incomplete"
            assert "<|" not in json.dumps(response["output"])


def test_arguments_that_are_no_json_reach_the_client_as_they_are(start: Start) -> None:
    server = start(' to=functions.get_weather<|channel|>commentary json<|message|>{"city": Rome<|call|>')
    with server.http() as http:
        item = stream(http, {"model": MODEL, "input": "hi", "tools": [WEATHER]})[-1]["response"]["output"][0]
    assert item["arguments"] == '{"city": Rome'


def test_a_call_without_arguments_is_an_empty_object_with_all_its_events(start: Start) -> None:
    server = start(" to=functions.get_weather<|channel|>commentary json<|message|><|call|>")
    with server.http() as http:
        events = stream(http, {"model": MODEL, "input": "hi", "tools": [WEATHER]})
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert deltas == ["{}"]


def test_a_response_above_the_size_limit_is_told(start: Start) -> None:
    server = start(HELLO, config={"max_response_bytes": 500})
    with server.http() as http:
        events = stream(http, {"model": MODEL, "input": "hi"})
        assert http.post("/responses", json={"model": MODEL, "input": "hi", "store": False}).status_code == 200
    assert events[-1]["type"] == "response.failed"
    assert "may be stored" in events[-1]["response"]["error"]["message"]


def test_a_slow_reader_gets_everything(start: Start) -> None:
    server = start("<|channel|>final<|message|>" + "lorem ipsum " * 800 + "<|return|>")
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        body = json.dumps({"model": MODEL, "input": "hi", "stream": True}).encode()
        head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        raw.sendall(head.encode() + body)
        soon(lambda: server.engine.running == 1)
        with server.http() as http:  # others are served meanwhile
            assert http.post("/responses", json={"model": MODEL, "input": "hi"}, timeout=20).status_code == 200
        received = b""
        while data := raw.recv(65536):
            received += data
    assert b"data: [DONE]" in received
    assert received.count(b"event: response.output_text.delta") == len(harmony("lorem ipsum " * 800))


def test_a_reader_that_takes_nothing_is_given_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "SEND_TIMEOUT", 0.5)
    server = start("<|channel|>final<|message|>" + "lorem ipsum " * 30_000 + "<|return|>")
    body = json.dumps({"model": MODEL, "input": "hi", "stream": True, "store": False}).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before connecting: the window is agreed on then
        raw.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        raw.sendall(head + body)
        soon(lambda: server.engine.running == 1)
        soon(lambda: server.engine.aborted == 1)
    assert server.engine.running == 0


def test_kill_9_loses_no_completed_response(start: Start, tmp_path: Path) -> None:
    store = tmp_path / "killed.sqlite"
    process, client = killable(store, HELLO, 1e6)
    completed: list[str] = []
    try:
        for number in range(40):
            body = {"model": MODEL, "input": f"{number}", "stream": True}
            with connect_sse(client, "POST", "/responses", json=body) as source:
                for sse in source.iter_sse():
                    if sse.event == "response.completed":
                        completed.append(sse.json()["response"]["id"])
                        if number == 39:
                            os.kill(process.pid, signal.SIGKILL)
                        break
    finally:
        process.kill()
        process.wait()
        client.close()
    server = start(HELLO, config={"store": str(store)})
    with server.http("") as http:
        http.headers.pop("Authorization")
        assert all(http.get(f"/responses/{one}").status_code == 200 for one in completed)
    assert len(completed) == 40


def test_a_background_response_whose_server_was_killed_is_failed(start: Start, tmp_path: Path) -> None:
    store = tmp_path / "killed.sqlite"
    process, client = killable(store, LONG, 20.0)
    made = client.post("/responses", json={"model": MODEL, "input": "x", "background": True}).json()
    process.kill()
    process.wait()
    client.close()
    server = start(HELLO, config={"store": str(store), "heartbeat": 0.5})
    with server.http() as http:
        http.headers.pop("Authorization")
        with connect_sse(http, "GET", f"/responses/{made['id']}?stream=true") as source:
            *_, last = [sse.json() for sse in source.iter_sse() if sse.data != "[DONE]"]
        assert last["type"] == "response.failed"
        assert http.get(f"/responses/{made['id']}").json()["status"] == "failed"


def test_many_requests_leave_nothing_behind(start: Start) -> None:
    """A small form of the 10,000 request run (see docs/responses.md): objects that one request leaves add up."""
    server: Running = start(PYTHON, HELLO, providers=[fakes.python()])

    def burst(count: int) -> int:
        with server.http() as http:
            for number in range(count):
                body = {"model": MODEL, "input": f"{number}", "tools": [INTERPRETER], "store": False}
                check_stream(stream(http, body)) if number % 50 == 0 else http.post("/responses", json=body)
        gc.collect()
        return len(gc.get_objects())

    server.engine.prompts = _Last()
    server.engine.samplings = _Last()  # type: ignore[assignment]
    burst(50)
    server.providers[0].calls.clear()
    server.providers[0].opened.clear()
    before = burst(50)
    server.providers[0].calls.clear()
    server.providers[0].opened.clear()
    grown = burst(100) - before
    server.providers[0].calls.clear()
    assert grown < 100 * 10, f"{grown} objects stayed after 100 requests"
    assert server.engine.running == 0


class _Last(list[Any]):
    """Keeps no history: the test looks for what the server keeps."""

    def append(self, value: Any) -> None:
        del value
