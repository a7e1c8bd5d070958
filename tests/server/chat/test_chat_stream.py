"""Compares streams of the chat handler with vLLM's own: the same results of the engine must give the same bytes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chat_requests import ASK, NOW, THINK, WEATHER, chat_handlers, request_of
from tests.support.harmony_streams import streams, tokens

pytestmark = pytest.mark.vllm

ANSWER = '<|channel|>final<|message|>It is 21 °C — schön, 「はい」 \\ "quoted"\n\t👍🏽.<|return|>'
PREAMBLE = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
TURNS = (
    ANSWER,
    THINK + ANSWER,
    THINK + ASK,
    THINK + PREAMBLE + ASK,
    THINK + ASK.replace("<|call|>", "<|end|><|start|>assistant") + ANSWER,
    THINK + "<|channel|>analysis<|message|>And more.<|end|><|start|>assistant" + ANSWER,
    "<|channel|>final<|message|>half a fla",
    "no header at all<|return|>",
    "<|return|>",
)


@pytest.fixture(scope="module")
def handlers() -> tuple[Any, Any]:
    return chat_handlers()


class Engine:
    """Results of one request: `parts` of its tokens, one each; `fails` after the last."""

    def __init__(self, parts: Sequence[Sequence[int]], finish: str | None = "stop", fails: Exception | None = None):
        self._parts, self._finish, self._fails = parts, finish, fails
        self.is_closed = False

    async def __call__(self) -> AsyncIterator[Any]:
        from vllm.outputs import CompletionOutput, RequestOutput

        try:
            for number, part in enumerate(self._parts, 1):
                reason = self._finish if number == len(self._parts) and not self._fails else None
                choice = CompletionOutput(0, "", list(part), None, None, finish_reason=reason)
                yield RequestOutput("r", None, [1, 2, 3], None, [choice], reason is not None, num_cached_tokens=1)
                await asyncio.sleep(0)
            if self._fails:
                raise self._fails
        finally:
            self.is_closed = True


def frames(handler: Any, engine: Engine, request: Any) -> tuple[list[str], Any]:
    """All frames of a stream, without random ids and times, and the usage that was counted."""
    metadata = SimpleNamespace(final_usage_info=None)

    async def read() -> list[str]:
        stream = handler.chat_completion_stream_generator(
            request, engine(), "chatcmpl-1", 'm "x"', [], object(), metadata, chat_template_kwargs={}
        )
        return [frame.decode() if isinstance(frame, bytes) else frame async for frame in stream]

    found = [re.sub("chatcmpl-tool-[0-9a-f]+", "ID", re.sub('"created":[0-9]+', "", f)) for f in asyncio.run(read())]
    return found, metadata.final_usage_info


def cut(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """`ids` in parts of `sizes`, again and again."""
    parts, at = [], 0
    while at < len(ids):
        size = sizes[len(parts) % len(sizes)]
        parts.append(ids[at : at + size])
        at += size
    return parts


options = st.fixed_dictionaries(
    {},
    optional={
        "include_reasoning": st.booleans(),
        "stream_options": st.sampled_from(
            [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
        ),
        "tools": st.sampled_from([[WEATHER], [WEATHER, NOW]]),
        "return_token_ids": st.booleans(),
        "parallel_tool_calls": st.booleans(),
    },
)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(st.sampled_from(TURNS).map(tokens), streams),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from(["stop", "length", "abort", "error"]),
    options,
)
def test_every_stream_has_the_bytes_of_vllms_own(
    handlers: tuple[Any, Any], turn: list[int], sizes: list[int], finish: str, fields: dict[str, Any]
) -> None:
    theirs, ours = handlers
    parts = cut(turn, sizes) or [[]]
    want, counted = frames(theirs, Engine(parts, finish), request_of(stream=True, **fields))
    got, also = frames(ours, Engine(parts, finish), request_of(stream=True, **fields))
    assert got == want
    assert also == counted


@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_a_failure_of_the_engine_is_told_as_vllm_tells_it(handlers: tuple[Any, Any], after: int) -> None:
    theirs, ours = handlers
    parts = cut(tokens(THINK + ANSWER), [1])[:after]
    want, _ = frames(theirs, Engine(parts, fails=RuntimeError("dead")), request_of(stream=True))
    got, _ = frames(ours, Engine(parts, fails=RuntimeError("dead")), request_of(stream=True))
    assert got == want
    assert '"error"' in got[-2]


def test_text_is_streamed_when_it_is_there(handlers: tuple[Any, Any]) -> None:
    """A token waits for no other: once the engine has given it, it is the next thing that is sent."""
    given: list[int] = []

    async def results() -> AsyncIterator[Any]:
        async for result in Engine(cut(tokens("<|channel|>final<|message|>one two three<|return|>"), [1]))():
            given.append(result.outputs[0].token_ids[0])
            yield result

    async def read() -> list[int]:
        metadata = SimpleNamespace(final_usage_info=None)
        stream = handlers[1].chat_completion_stream_generator(
            request_of(stream=True), results(), "c", "m", [], object(), metadata, chat_template_kwargs={}
        )
        return [len(given) async for frame in stream if isinstance(frame, bytes)]

    assert asyncio.run(read()) == [4, 5, 6]


def test_a_client_that_goes_away_ends_the_request(handlers: tuple[Any, Any]) -> None:
    engine = Engine(cut(tokens(THINK + ANSWER), [1]))

    async def leave() -> None:
        metadata = SimpleNamespace(final_usage_info=None)
        stream = handlers[1].chat_completion_stream_generator(
            request_of(stream=True), engine(), "c", "m", [], object(), metadata, chat_template_kwargs={}
        )
        for _ in range(3):
            await anext(stream)
        await stream.aclose()
        assert engine.is_closed

    asyncio.run(leave())


def test_a_request_that_wants_more_than_text_is_left_to_vllm(handlers: tuple[Any, Any]) -> None:
    plain = handlers[1]._is_plain
    assert plain(request_of(stream=True))
    assert plain(request_of(stream=True, n=1, stream_options={"include_usage": True}))
    for fields in ({"n": 2}, {"logprobs": True}, {"echo": True}, {"return_token_ids": True}, {"use_beam_search": True}):
        assert not plain(request_of(stream=True, **fields)), fields
