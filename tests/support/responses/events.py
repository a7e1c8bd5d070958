"""Reads streams strictly: every event must be openai-python's type of it, with no field the type does not have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import httpx
from httpx_sse import connect_sse
from openai.types.responses.response import Response
from openai.types.responses.response_stream_event import ResponseStreamEvent
from pydantic import BaseModel

EVENT_TYPES: dict[str, type[BaseModel]] = {
    get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(get_args(ResponseStreamEvent)[0])
}

OURS = {"lines", "quote", "presence_penalty", "frequency_penalty", "store", "name", "bytes", "status"}
"""Additions to openai's types: line ranges of citations, three echoed parameters and the bytes of streamed logprobs
(Open Responses), the function's name on `function_call_arguments.done` (OpenAI's API reference), and the status of a
custom tool call (`ResponseCustomToolCallItem` has it, the union of output items does not)."""


def check(model: type[BaseModel], value: dict[str, Any]) -> Any:
    """Validates strictly and looks for unknown fields at every depth."""
    parsed = model.model_validate(value, strict=True)
    _no_extras(parsed, type(parsed).__name__)
    return parsed


def _no_extras(value: Any, where: str) -> None:
    if isinstance(value, BaseModel):
        extra = set(value.model_extra or ()) - OURS
        assert not extra, f"{where}: fields that openai's type does not have: {extra}"
        for name in value.model_fields_set:
            _no_extras(getattr(value, name, None), f"{where}.{name}")
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _no_extras(entry, f"{where}[{index}]")


def check_response(body: dict[str, Any]) -> Response:
    checked: Response = check(Response, body)
    return checked


def check_stream(events: list[dict[str, Any]], *, first: int = 0) -> None:
    """Properties of every stream."""
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    places: dict[str, int] = {}
    added: list[int] = []
    done: dict[int, dict[str, Any]] = {}
    for event in events:
        check(EVENT_TYPES[event["type"]], event)
        if event["type"] == "response.output_item.added":
            added.append(event["output_index"])
            places[event["item"]["id"]] = event["output_index"]
        elif event["type"] == "response.output_item.done":
            assert places[event["item"]["id"]] == event["output_index"]
            done[event["output_index"]] = event["item"]
        elif "item_id" in event:
            assert places[event["item_id"]] == event["output_index"], event
            assert event["output_index"] not in done, f"after it was done: {event}"
    if first == 0:
        assert added == sorted(done) == list(range(len(added))), "every item is added once, in order, and ends"
        final = events[-1]["response"]
        assert final["output"] == [done[index] for index in sorted(done)], "the last response is what was streamed"
        joined = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
        assert joined == "".join(p["text"] for i in final["output"] if i["type"] == "message" for p in i["content"])


def stream(client: httpx.Client, body: dict[str, Any], *, strict: bool = True) -> list[dict[str, Any]]:
    """POSTs with `stream` and returns all events; the stream must end with [DONE]."""
    with connect_sse(client, "POST", "/responses", json={**body, "stream": True}) as source:
        source.response.read() if source.response.status_code != 200 else None
        assert source.response.status_code == 200, source.response.text
        events = read(source.iter_sse())
    if strict:
        check_stream(events)
    return events


def read(source: Iterable[Any]) -> list[dict[str, Any]]:
    events = []
    for sse in source:
        if sse.data == "[DONE]":
            return events
        event = sse.json()
        assert event["type"] == sse.event
        events.append(event)
    raise AssertionError("the stream did not end with [DONE]")


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def unparsed(value: Any) -> Any:
    """Without what the helper adds to items."""
    if isinstance(value, list):
        return [unparsed(entry) for entry in value]
    if isinstance(value, dict):
        return {key: unparsed(entry) for key, entry in value.items() if not key.startswith("parsed")}
    return value
