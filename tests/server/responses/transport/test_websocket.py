"""/v1/responses over a WebSocket: sequence, continuation, recovery."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from tests.support.responses.events import check_stream
from tests.support.responses.server import MODEL, Start
from tests.support.responses.turns import CALL, HELLO, LONG, WEATHER
from tests.support.responses.websocket import ask, dial
from tests.support.waiting import soon
from vllm_gptoss.server.responses.state import caller
from vllm_gptoss.server.responses.transport import websocket


def test_unstored_responses_continue_on_their_connection_only(start: Start) -> None:
    server = start(CALL, HELLO)
    with dial(server) as socket:
        first = ask(socket, input="?", tools=[WEATHER], store=False)[-1]["response"]
        answer = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "sunny"}
        again = {"input": [answer], "previous_response_id": first["id"], "tools": [WEATHER], "store": False}
        assert ask(socket, **again)[-1]["type"] == "response.completed"
        assert "Look it up." in server.prompt()
    with dial(server) as socket:
        (error,) = ask(socket, **again)
        assert error["type"] == "error"
        assert error["status"] == 400
        assert error["error"]["code"] == "previous_response_not_found"
        whole = [{"role": "user", "content": "?"}, *first["output"], answer]
        assert ask(socket, input=whole, tools=[WEATHER], store=False)[-1]["type"] == "response.completed"


def test_a_failed_continuation_forgets_what_it_went_on_from(start: Start) -> None:
    server = start(CALL, HELLO)
    with dial(server) as socket:
        first = ask(socket, input="?", tools=[WEATHER], store=False)[-1]["response"]
        wrong = {"type": "function_call_output", "call_id": "call_wrong", "output": "x"}
        (error,) = ask(socket, input=[wrong], previous_response_id=first["id"], store=False)
        assert error["error"]["param"] == "input[0].call_id"
        right = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "x"}
        (error,) = ask(socket, input=[right], previous_response_id=first["id"], store=False)
        assert error["error"]["code"] == "previous_response_not_found"


def test_warming_up_generates_nothing_and_can_be_continued(start: Start) -> None:
    server = start(HELLO)
    with dial(server) as socket:
        warmed = ask(socket, input="Remember the milk.", generate=False, store=False)
        assert warmed[-1]["response"]["output"] == []
        assert server.engine.prompts == []
        ask(socket, input="hi", previous_response_id=warmed[-1]["response"]["id"], store=False)
    assert "Remember the milk." in server.prompt()


def test_errors_leave_the_connection_usable(start: Start) -> None:
    server = start(HELLO)
    with dial(server) as socket:
        for wrong in ("{", "[]", '"x"', '{"type":"response.steer"}', '{"type":"response.create","made_up":1}'):
            socket.send(wrong)
            assert json.loads(socket.recv(10))["type"] == "error"
        check_stream(ask(socket, input="hi"))


def test_streams_of_one_connection_run_at_once_and_each_in_its_order(start: Start) -> None:
    server = start(LONG, rate=100.0)
    asked = [("a", "one"), ("b", "one"), ("a", "two"), (None, "one")]
    events: list[dict[str, Any]] = []
    with dial(server) as socket:
        for stream, text in asked:
            message = {"type": "response.create", "model": MODEL, "input": text, "metadata": {"text": text}}
            socket.send(json.dumps(message if stream is None else {**message, "stream_id": stream}))
        most = 0
        while sum(event["type"] == "response.completed" for event in events) < len(asked):
            events.append(json.loads(socket.recv(60)))
            most = max(most, server.engine.running)
    assert most == 3
    for stream in ("a", "b", None):
        own = [event for event in events if event.get("stream_id") == stream]
        ends = [n for n, event in enumerate(own, 1) if event["type"] == "response.completed"]
        turns = [own[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        assert [turn[0]["response"]["metadata"]["text"] for turn in turns] == [t for s, t in asked if s == stream]
        for turn in turns:
            assert [event["sequence_number"] for event in turn] == list(range(len(turn)))


def test_streams_beyond_the_limit_wait_and_end_with_the_socket(start: Start) -> None:
    server = start(LONG, rate=100.0)
    with dial(server) as socket:
        for number in range(12):
            message = {"type": "response.create", "model": MODEL, "input": "hi", "stream_id": f"s{number}"}
            socket.send(json.dumps(message))
        soon(lambda: server.engine.running == websocket.MAX_STREAMS)
        socket.recv(20)
        assert server.engine.running <= websocket.MAX_STREAMS
    soon(lambda: server.engine.running == 0)


@pytest.mark.parametrize("waiting", [2, 3])
def test_a_request_beyond_those_that_may_wait_is_read_later(
    start: Start, monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    monkeypatch.setattr(websocket, "MAX_WAITING", 3)
    server, kinds = start(LONG, rate=100.0), list[str]()
    body = {"type": "response.create", "model": MODEL, "input": "hi", "stream_id": "s", "max_output_tokens": 60}
    with dial(server) as socket:
        for message in (*[json.dumps(body)] * waiting, "{"):
            socket.send(message)
        while "error" not in kinds:
            kinds.append(json.loads(socket.recv(20))["type"])
    assert ("response.incomplete" in kinds) is (waiting == 3)


def test_who_leaves_with_requests_unanswered_leaves_nothing_behind(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """More than the server takes in: it waited for room behind the connection's end, and could not be stopped."""
    server = start(LONG, rate=20.0)
    with dial(server) as socket:
        for _ in range(40):
            socket.send(json.dumps({"type": "response.create", "model": MODEL, "input": "hi", "store": False}))
        soon(lambda: server.engine.running == 1)
        socket.socket.shutdown(2)
    soon(lambda: server.engine.running == 0)
    soon(lambda: server.call(connections()) == 0)
    assert "Traceback" not in capfd.readouterr().err


async def connections() -> int:
    return sum("run_asgi" in repr(task) for task in asyncio.all_tasks())


def test_a_binary_message_is_read_as_the_text_that_it_is(start: Start) -> None:
    server = start(HELLO)
    with dial(server) as socket:
        socket.send(b"\xff")
        assert json.loads(socket.recv(20))["error"]["code"] == "invalid_json"
        socket.send(json.dumps({"type": "response.create", "model": MODEL, "input": "hi"}).encode())
        assert json.loads(socket.recv(20))["type"] == "response.created"


def test_the_openai_client_connects(start: Start) -> None:
    server = start(HELLO)
    with server.client().responses.connect() as connection:
        connection.response.create(model=MODEL, input="hi")
        for event in connection:
            if event.type == "response.completed":
                assert event.response.output_text == "Hello there!"
                break


def test_a_connection_keeps_what_is_gone_on_from_and_not_everything(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller, "MEMORY_BYTES", 40_000)
    server = start(HELLO)
    with dial(server) as socket:
        last = ask(socket, input="first " + "word " * 1000, store=False)[-1]["response"]["id"]
        beside = ask(socket, input="beside " + "word " * 1000, store=False)[-1]["response"]["id"]
        for number in range(20):
            events = ask(socket, input=f"turn {number}", store=False, previous_response_id=last)
            assert events[-1]["type"] == "response.completed", events[-1]
            last = events[-1]["response"]["id"]
            ask(socket, input="beside " + "word " * 500, store=False)
        assert "first word" in server.prompt(-2), "a chain in use stays"
        (error,) = ask(socket, input="x", store=False, previous_response_id=beside)
        assert error["error"]["code"] == "previous_response_not_found"


def test_each_key_has_so_many_connections_at_most(start: Start) -> None:
    server = start(HELLO, config={"max_sockets": 1, "total_sockets": 2})
    with dial(server) as socket, dial(server) as second:
        ask(socket, input="hi")
        error = json.loads(second.recv(10))
        assert (error["type"], error["status"]) == ("error", 429)
        with dial(server, "bob") as other, dial(server, "carol") as third:
            ask(other, input="hi")
            assert json.loads(third.recv(10))["status"] == 503
    with dial(server) as again:
        ask(again, input="hi")


def test_a_client_that_reads_nothing_is_disconnected(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receive buffer is fixed: Linux may enlarge it to 32 MiB, which is more than the whole response."""
    monkeypatch.setattr(websocket, "SEND_S", 0.2)
    server = start("<|channel|>final<|message|>" + "word " * 200_000)
    host, port = server.url.removeprefix("http://").split(":")
    head = f"GET /v1/responses HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    head += f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {'A' * 22}==\r\n\r\n"
    message = json.dumps({"type": "response.create", "model": MODEL, "input": "hi"}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(head.encode())
        assert b" 101 " in client.recv(4096)
        client.sendall(bytes([0x81, 0x80 | len(message)]) + bytes(4) + message)  # RFC 6455: final, text, masked with 0
        soon(lambda: server.engine.aborted == 1)
