"""Stop strings and stop tokens: the answer ends before them, reasoning and calls do not, nothing runs after them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.responses import fakes
from tests.support.responses.events import stream
from tests.support.responses.server import MODEL, Start, harmony
from tests.support.responses.turns import INTERPRETER, WEATHER

THOUGHT = "<|channel|>analysis<|message|>STOP here? No.<|end|><|start|>assistant"
ANSWER = "<|channel|>final<|message|>One two STOP three<|return|>"


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("stop", ["STOP", ["three", " STOP"], ["STOP three"]])
def test_the_answer_ends_before_a_stop_string(start: Start, stop: Any, chunk: int) -> None:
    server = start(THOUGHT + ANSWER, chunk=chunk)
    with server.http() as http:
        response = stream(http, {"model": MODEL, "input": "?", "stop": stop})[-1]["response"]
    assert text_of(response).rstrip() == "One two"
    assert response["output"][0]["content"][0]["text"] == "STOP here? No."
    assert [item["status"] for item in response["output"]] == ["completed", "completed"]
    assert response["status"] == "completed"
    assert server.engine.running == 0
    assert "stop" not in server.engine.samplings[0].options, "the engine would find it in the reasoning"


def test_generation_ends_with_the_answer(start: Start) -> None:
    server = start(THOUGHT + ANSWER.replace("three", "three " * 500))
    with server.http() as http:
        usage = stream(http, {"model": MODEL, "input": "?", "stop": "STOP"})[-1]["response"]["usage"]
    assert usage["output_tokens"] == len(harmony(THOUGHT + ANSWER.split("three")[0].rstrip()))
    assert server.engine.aborted == 1


def test_a_stop_string_that_never_ends_is_text(start: Start) -> None:
    with start(THOUGHT + ANSWER).http() as http:
        assert text_of(stream(http, {"model": MODEL, "input": "?", "stop": "three four"})[-1]["response"]) == (
            "One two STOP three"
        )


def test_min_tokens_come_before_any_stop_string(start: Start) -> None:
    with start(ANSWER.replace("three", "three STOP four")).http() as http:
        body = {"model": MODEL, "input": "?", "stop": "STOP", "min_tokens": 7}
        assert text_of(stream(http, body)[-1]["response"]) == "One two STOP three "


def test_logprobs_are_those_of_the_text(start: Start) -> None:
    body = {"model": MODEL, "input": "?", "include": ["message.output_text.logprobs"], "stop": "STOP three"}
    with start(THOUGHT + ANSWER).http() as http:
        part = stream(http, body)[-1]["response"]["output"][-1]["content"][0]
    assert part["text"].rstrip() == "".join(entry["token"] for entry in part["logprobs"]).rstrip() == "One two"


def test_arguments_may_contain_a_stop_string(start: Start) -> None:
    call = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city":"STOP"}<|call|>'
    with start(call).http() as http:
        response = stream(http, {"model": MODEL, "input": "?", "tools": [WEATHER], "stop": "STOP"})[-1]["response"]
    assert response["output"][0]["arguments"] == '{"city":"STOP"}'


def test_a_call_before_the_stop_string_is_not_run(start: Start) -> None:
    """A stop string ends the turn: calls that an unconstrained model wrote before it do not run either."""
    tool = fakes.python()
    call = " to=python<|channel|>analysis code<|message|>print(1)<|end|><|start|>assistant"
    with start(call + ANSWER, providers=[tool]).http() as http:
        body = {"model": MODEL, "input": "?", "tools": [INTERPRETER], "stop": "STOP"}
        response = stream(http, body)[-1]["response"]
    assert [item["status"] for item in response["output"]] == ["incomplete", "completed"]
    assert tool.calls == []


def test_a_call_that_a_stop_token_cut_is_not_run(start: Start) -> None:
    tool = fakes.python()
    (one,) = harmony("1")
    with start(" to=python<|channel|>analysis code<|message|>print(1)<|call|>", providers=[tool]).http() as http:
        body = {"model": MODEL, "input": "?", "tools": [INTERPRETER], "stop_token_ids": [one]}
        response = stream(http, body)[-1]["response"]
    assert (response["output"][0]["code"], response["output"][0]["status"]) == ("print(", "incomplete")
    assert tool.calls == []


def test_a_stop_token_is_no_part_of_the_answer(start: Start) -> None:
    (three,) = harmony(" three")
    with start(ANSWER).http() as http:
        response = stream(http, {"model": MODEL, "input": "?", "stop_token_ids": [three]})[-1]["response"]
    assert text_of(response) == "One two STOP"
    assert response["status"] == response["output"][0]["status"] == "completed"


OVERRUN = (
    "<|channel|>final<|message|>Hello there!<|return|><|start|>assistant<|channel|>final<|message|>More.<|return|>"
)
MADE_UP = (
    ' to=functions.get_weather<|channel|>commentary json<|message|>{"city":"Rome"}<|call|>'
    "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>sunny<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is sunny.<|return|>"
)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_what_an_engine_says_after_the_end_is_not_heard(start: Start, chunk: int) -> None:
    """Not every engine stops at `<|return|>` and `<|call|>`, and one that speculates may overrun them."""
    with start(OVERRUN, stops_itself=False, chunk=chunk).http() as http:
        (message,) = stream(http, {"model": MODEL, "input": "hi"})[-1]["response"]["output"]
        assert message["content"][0]["text"] == "Hello there!"
    with start(MADE_UP, stops_itself=False, chunk=chunk).http() as http:
        response = stream(http, {"model": MODEL, "input": "hi", "tools": [WEATHER]})[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["function_call"]
    assert response["status"] == "completed"


def test_ignore_eos_generates_up_to_the_limit(start: Start) -> None:
    server = start(OVERRUN * 20)
    with server.http() as http:
        response = stream(http, {"model": MODEL, "input": "hi", "ignore_eos": True, "max_output_tokens": 90})[-1]
    assert response["response"]["usage"]["output_tokens"] == 90
    assert server.engine.samplings[-1].structural_tag is None
