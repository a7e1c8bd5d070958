"""The stream of events: fast encoding gives the same bytes; silence differs from a client that reads nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from vllm_gptoss.server.harmony.events import Channel
from vllm_gptoss.server.responses.run.events import Event, Output, TextDeltas
from vllm_gptoss.server.responses.run.item_writers import FunctionCallWriter, MessageWriter, ReasoningWriter, Style
from vllm_gptoss.server.responses.transport import event_stream
from vllm_gptoss.server.responses.transport.event_stream import OPEN_NAMES, OPENAI_NAMES, EventStream, frame

text = st.text(st.characters(codec="utf-8"))
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
fields = st.dictionaries(text.filter(lambda key: key != "type"), plain, max_size=5)
events = st.builds(lambda kind, rest: {"type": kind, **rest}, st.sampled_from(["error", "response.created"]), fields)


@given(events)
def test_a_frame_is_the_bytes_that_pydantic_makes_of_an_event(event: Event) -> None:
    assert frame(event) == b"event: " + event["type"].encode() + b"\ndata: " + to_json(event) + b"\n\n"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_logprob_is_read_back_as_it_was(value: float) -> None:
    data = frame({"type": "response.output_text.delta", "logprobs": [{"logprob": value}]}).split(b"\ndata: ")[1]
    assert json.loads(data)["logprobs"][0]["logprob"] == value


@given(st.lists(text.filter(bool), min_size=1, max_size=8))
def test_deltas_have_the_fields_of_their_events_in_order_and_are_numbered(pieces: list[str]) -> None:
    style = Style(reasoning=True, summary="detailed")
    for make, kinds in (
        (lambda out: ReasoningWriter(out, style), ("reasoning_text", "reasoning_summary_text")),
        (lambda out: MessageWriter(out, style, Channel.FINAL, []), ("output_text",)),
        (lambda out: FunctionCallWriter(out, "f", None), ("function_call_arguments",)),
    ):
        writer = make(Output())
        heard = [event for piece in pieces for event in writer.delta(piece)]
        heard += writer.end("".join(pieces), cut=False)
        assert [event["sequence_number"] for event in heard] == list(range(len(heard)))
        item = next(event["item"]["id"] for event in heard if "item" in event)
        for kind in kinds:
            deltas = [event for event in heard if event["type"] == f"response.{kind}.delta"]
            assert "".join(event["delta"] for event in deltas) == "".join(pieces)
            assert {tuple(event) for event in deltas} == {_fields(kind)}
            assert {event["item_id"] for event in deltas} == {item}
    quick = MessageWriter(Output(), style, Channel.FINAL, [])
    for piece in pieces:
        if not quick.adds(piece):
            quick.delta(piece)
    assert quick.end("", cut=False)[-1]["item"]["content"][0]["text"] == "".join(pieces)


def _fields(kind: str) -> tuple[str, ...]:
    """Names of a delta's fields, in the order of OpenAI's reference."""
    index = {"reasoning_summary_text": ("summary_index",), "function_call_arguments": ()}.get(kind, ("content_index",))
    last = ("logprobs",) if kind == "output_text" else ()
    return ("type", "sequence_number", "item_id", "output_index", *index, "delta", *last)


@given(st.lists(text, min_size=2, max_size=4), st.sampled_from([OPENAI_NAMES, OPEN_NAMES]))
def test_text_that_is_sent_directly_has_the_bytes_of_its_event(pieces: list[str], names: dict[str, str]) -> None:
    deltas = TextDeltas("response.reasoning_text.delta", {"item_id": "rs_1", "output_index": 0}, {"logprobs": []})
    stream = EventStream(endless([], 0), names)
    for number, piece in enumerate(pieces, 9):
        assert stream.framed_text(deltas, number, piece) == stream.framed([deltas.event(number, piece)])


class Reader:
    """The other end, as an ASGI server shows it: takes `takes` messages, then none."""

    def __init__(self, takes: int = 1_000) -> None:
        self.taken: list[bytes] = []
        self.is_gone = asyncio.Event()
        self._takes = takes

    async def receive(self) -> dict[str, Any]:
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.taken) >= self._takes:
            await asyncio.Event().wait()
        self.taken.append(message.get("body", b""))
        if message.get("more_body") is False:  # then an ASGI server reports a disconnect
            self.is_gone.set()


async def endless(closed: list[bool], pause: float) -> AsyncGenerator[list[Event], None]:
    try:
        for number in range(10_000):
            yield [{"type": "response.output_text.delta", "sequence_number": number, "delta": "x"}]
            await asyncio.sleep(pause)
    finally:
        closed.append(True)


def test_a_silent_stream_is_kept_alive_and_a_client_that_goes_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE", 0.02)

    async def run() -> tuple[list[bytes], list[bool]]:
        reader, closed = Reader(), []
        stream = asyncio.create_task(EventStream(endless(closed, 3600))({}, reader.receive, reader.send))
        while reader.taken.count(b": keep-alive\n\n") < 2:
            assert not stream.done()
            await asyncio.sleep(0.01)
        reader.is_gone.set()
        await stream
        return reader.taken, closed

    taken, closed = asyncio.run(asyncio.wait_for(run(), 30))
    assert taken[1].startswith(b"event: response.output_text.delta")
    assert closed == [True]


def test_a_stream_that_speaks_needs_no_keep_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE", 3600.0)

    async def run() -> list[bytes]:
        reader = Reader()
        batches = endless([], 0)
        stream = asyncio.create_task(EventStream(batches)({}, reader.receive, reader.send))
        while len(reader.taken) < 50:
            await asyncio.sleep(0)
        reader.is_gone.set()
        await stream
        return reader.taken

    assert b": keep-alive\n\n" not in asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("takes", [1, 2, 3])
def test_a_reader_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch, takes: int) -> None:
    """Also where it stops between two tokens and what is stuck is the sign of life itself."""
    monkeypatch.setattr(event_stream, "KEEP_ALIVE", 0.02)
    monkeypatch.setattr(event_stream, "SEND_TIMEOUT", 0.1)

    async def run() -> list[bool]:
        reader, closed = Reader(takes), []
        await EventStream(endless(closed, 3600 if takes == 3 else 0))({}, reader.receive, reader.send)
        return closed

    assert asyncio.run(asyncio.wait_for(run(), 30)) == [True]
