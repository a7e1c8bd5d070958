"""`/v1/messages` with Anthropic's client: thinking, tools, answers of a schema, whole and streamed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

from demo.server import NAME, Server
from tests.support.responses.pdf import pdf

pytestmark = [pytest.mark.vllm, pytest.mark.serve]

QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
Ask = Callable[..., Any]


@pytest.fixture(params=["whole", "streamed"])
def ask(served: Server, request: pytest.FixtureRequest) -> Iterator[Ask]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=180) as client:

        def whole(**fields: Any) -> Any:
            return client.messages.create(
                **{"model": NAME, "max_tokens": 300, "extra_body": {"temperature": 0}, **fields}
            )

        def streamed(**fields: Any) -> Any:
            fields = {"model": NAME, "max_tokens": 300, "extra_body": {"temperature": 0}, **fields}
            with client.messages.stream(**fields) as stream:
                return stream.get_final_message()

        yield whole if request.param == "whole" else streamed


def blocks(message: Any) -> dict[str, Any]:
    return {block.type: block for block in message.content}


def test_thinking_comes_before_the_answer(ask: Ask) -> None:
    message = ask(messages=[QUESTION], thinking={"type": "adaptive"}, max_tokens=1100)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking
    assert message.content[1].text
    assert message.stop_reason == "end_turn"


def test_a_thinking_budget_is_an_effort(ask: Ask, served: Server) -> None:
    message = ask(messages=[QUESTION], thinking={"type": "enabled", "budget_tokens": 5000}, max_tokens=6000)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking
    assert served.log.read_text().count("tokens is reasoning effort medium") == 1


def test_a_tool_is_called_and_its_result_answered(ask: Ask) -> None:
    made = ask(messages=[QUESTION], tools=[WEATHER])
    call = blocks(made)["tool_use"]
    assert (call.name, call.input, made.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    assert blocks(made)["thinking"].thinking
    history = [
        QUESTION,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in made.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
    ]
    answer = ask(messages=history, tools=[WEATHER])
    assert blocks(answer)["text"].text == "It is sunny in Paris."


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_can_be_demanded_and_forbidden(ask: Ask, choice: Any) -> None:
    made = ask(messages=[{"role": "user", "content": "Hello"}], tools=[WEATHER], tool_choice=choice)
    assert blocks(made)["tool_use"].name == "get_weather"
    assert "tool_use" not in blocks(ask(messages=[QUESTION], tools=[WEATHER], tool_choice={"type": "none"}))


LONG = {"description": "x" * 10_000}
"""A schema with it is not read in the server's own thread."""


def test_a_strict_tool_keeps_to_a_large_schema(ask: Ask) -> None:
    schema = {**WEATHER["input_schema"], "properties": {"city": {"enum": ["Rome"], **LONG}}}
    choice = {"type": "tool", "name": "get_weather"}
    made = ask(messages=[QUESTION], tools=[{**WEATHER, "input_schema": schema, "strict": True}], tool_choice=choice)
    assert blocks(made)["tool_use"].input == {"city": "Rome"}


@pytest.mark.parametrize("more", [{}, LONG], ids=["small", "large"])
def test_an_answer_keeps_to_its_schema(ask: Ask, more: dict[str, str]) -> None:
    schema = {
        "type": "object",
        "properties": {"sunny": {"type": "boolean"}, "scale": {"enum": ["kelvin"], **more}},
        "required": ["sunny", "scale"],
        "additionalProperties": False,
    }
    made = ask(messages=[QUESTION], output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(blocks(made)["text"].text) in ({"sunny": value, "scale": "kelvin"} for value in (True, False))


def test_an_answers_schema_without_a_grammar_is_refused(ask: Ask) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema: '\$ref'") as refused:
        ask(messages=[QUESTION], output_config={"format": {"type": "json_schema", "schema": schema}})
    assert refused.value.type == "invalid_request_error"


def test_a_tool_that_was_searched_for_can_be_called(ask: Ask) -> None:
    """Claude Code's tool search: the result has references to tools."""
    history = [
        QUESTION,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "find", "input": {"q": "weather"}}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "tool_reference", "tool_name": "get_weather"}],
                }
            ],
        },
    ]
    made = ask(messages=history, tools=[WEATHER], tool_choice={"type": "any"})
    assert blocks(made)["tool_use"].name == "get_weather"


def test_what_a_tool_returned_is_read_or_described(ask: Ask, served: Server) -> None:
    """Claude Code's image or PDF, which is in the history of every later turn."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    document = {"type": "document", "title": "a", "source": {"type": "text", "media_type": "text/plain", "data": "one"}}
    encoded = base64.b64encode(pdf("two")).decode()
    read = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": encoded}}
    found = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "three"}]}
    parts = [{"type": "text", "text": "p.png"}, image, document, read, found, {"type": "document", "source": None}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": parts}
    history = [
        QUESTION,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}]},
        {"role": "user", "content": [result, document, read, found]},
    ]
    made = ask(messages=history, max_tokens=9)
    assert made.usage.output_tokens
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        counted = client.messages.count_tokens(model=NAME, messages=history)  # type: ignore[arg-type]
    assert counted.input_tokens == made.usage.input_tokens
