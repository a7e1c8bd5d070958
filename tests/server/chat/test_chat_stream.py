"""Compares streams of the chat handler with vLLM's own: the same results of the engine must give the same bytes.

How a failure and a client that leaves end a stream is tested here for completions too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chat_requests import ASK, NOW, THINK, WEATHER, request_of
from tests.support.harmony_streams import streams, tokens
from tests.support.streamed import CHAT, COMPLETIONS, Results, both_frames, completion_request, handlers_of, stream_of

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


def cut(ids: Sequence[int], sizes: Sequence[int]) -> list[tuple[str, Sequence[int]]]:
    """`ids` in parts of `sizes`, again and again; the handler makes the text."""
    parts, at = [], 0
    while at < len(ids):
        size = sizes[len(parts) % len(sizes)]
        parts.append(("", ids[at : at + size]))
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
    turn: list[int], sizes: list[int], finish: str, fields: dict[str, Any]
) -> None:
    parts = cut(turn, sizes) or [("", [])]
    want, got = both_frames(CHAT, lambda: Results(parts, finish), lambda: request_of(stream=True, **fields))
    assert got == want


@pytest.mark.parametrize(
    ("path", "after"), [*((CHAT, after) for after in (0, 1, 4, 9)), *((COMPLETIONS, after) for after in (0, 1, 3))]
)
def test_a_failure_of_the_engine_is_told_as_vllm_tells_it(path: str, after: int) -> None:
    parts = cut(tokens(THINK + ANSWER), [1]) if path == CHAT else [(" word", [7])] * after
    make = request_of if path == CHAT else completion_request
    want, got = both_frames(path, lambda: Results(parts[:after], fails=RuntimeError("dead")), lambda: make(stream=True))
    assert got == want
    assert '"error"' in got[0][-2]


def test_text_is_streamed_when_it_is_there() -> None:
    """A token waits for no other: once the engine has given it, it is the next thing that is sent."""
    given: list[int] = []

    async def results() -> AsyncIterator[Any]:
        async for result in Results(cut(tokens("<|channel|>final<|message|>one two three<|return|>"), [1]))():
            given.append(result.outputs[0].token_ids[0])
            yield result

    async def read() -> list[int]:
        stream = stream_of(CHAT, handlers_of(CHAT)[1], request_of(stream=True), results(), "c", SimpleNamespace())
        return [len(given) async for frame in stream if isinstance(frame, bytes)]

    assert asyncio.run(read()) == [4, 5, 6]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_client_that_goes_away_ends_the_request(path: str) -> None:
    results = Results(cut(tokens(THINK + ANSWER), [1]) if path == CHAT else [(" word", [7])] * 9)
    make = request_of if path == CHAT else completion_request

    async def leave() -> None:
        stream = stream_of(path, handlers_of(path)[1], make(stream=True), results(), "c", SimpleNamespace())
        for _ in range(3):
            await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(0 if path == CHAT else 10):
            while not results.is_closed:
                await asyncio.sleep(0.01)

    asyncio.run(leave())
