"""/v1/responses over a WebSocket: sequence, continuation, recovery."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.responses.conftest import MODEL, Running, Start
from tests.responses.events import check_stream
from tests.responses.test_background import LONG
from tests.responses.test_create import CALL, HELLO, WEATHER
from tests.responses.test_faults import soon


@contextmanager
def dial(server: Running, key: str = "alice") -> Iterator[ClientConnection]:
    url = server.url.replace("http", "ws") + "/v1/responses"
    with connect(url, additional_headers={"Authorization": f"Bearer {key}"}) as socket:
        yield socket


def ask(socket: ClientConnection, **fields: Any) -> list[dict[str, Any]]:
    socket.send(json.dumps({"type": "response.create", "model": MODEL, **fields}))
    events = []
    while True:
        events.append(json.loads(socket.recv(20)))
        kind = events[-1]["type"]
        if kind == "error" or kind in ("response.completed", "response.failed", "response.incomplete"):
            return events


def test_responses_follow_each_other_on_one_connection(start: Start) -> None:
    server = start(HELLO)
    with dial(server) as socket:
        for _ in range(3):
            check_stream(ask(socket, input="hi"))


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


def test_a_stream_id_is_on_every_event(start: Start) -> None:
    server = start(HELLO)
    with dial(server) as socket:
        assert {event["stream_id"] for event in ask(socket, input="hi", stream_id="s1")} == {"s1"}


def test_a_closed_socket_stops_the_engine(start: Start) -> None:
    server = start(LONG, rate=20.0)
    with dial(server) as socket:
        socket.send(json.dumps({"type": "response.create", "model": MODEL, "input": "hi"}))
        socket.recv(10)
        soon(lambda: server.engine.running == 1)
    soon(lambda: server.engine.running == 0)


def test_the_openai_client_connects(start: Start) -> None:
    server = start(HELLO)
    with server.client().responses.connect() as connection:
        connection.response.create(model=MODEL, input="hi")
        for event in connection:
            if event.type == "response.completed":
                assert event.response.output_text == "Hello there!"
                break
