"""Properties of the parser for any tokens: it does not raise, it loses no text, and streaming changes nothing."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import scale
from tests.support.harmony_streams import TOOLS, WORDS, any_token, merged, spelled, streams, tokens, transcript
from vllm_gptoss.server.harmony.events import ContentDelta, EndedBy, HarmonyEvent, MessageEnded, MessageStarted
from vllm_gptoss.server.harmony.parser import HarmonyParser
from vllm_gptoss.server.harmony.tokens import FIRST_CONTROL, encode


def parse(ids: list[int], cut: bool = False, chunks: list[int] | None = None) -> list[HarmonyEvent]:
    parser = HarmonyParser(TOOLS)
    events: list[HarmonyEvent] = []
    at = 0
    for size in chunks or []:
        events += parser.feed(ids[at : at + size])
        at += size
    events += parser.feed(ids[at:])
    return events + parser.finish(cut)


@settings(max_examples=600, deadline=None)
@given(ids=streams, cut=st.booleans())
def test_events_are_a_lossless_transcript_of_any_tokens(ids: list[int], cut: bool) -> None:
    assert transcript(parse(ids, cut)) == spelled(ids)


@settings(max_examples=400, deadline=None)
@given(ids=streams, cut=st.booleans(), chunks=st.lists(st.integers(0, 7), max_size=40))
def test_chunking_never_changes_the_result(ids: list[int], cut: bool, chunks: list[int]) -> None:
    whole = merged(parse(ids, cut))
    assert merged(parse(ids, cut, chunks)) == whole
    assert merged(parse(ids, cut, [1] * len(ids))) == whole


@settings(max_examples=400, deadline=None)
@given(ids=streams, cut=st.booleans())
def test_messages_are_announced_grow_and_end_in_order(ids: list[int], cut: bool) -> None:
    open_message: int | None = None
    text, count, last_end = "", 0, 0
    for event in parse(ids, cut):
        match event:
            case MessageStarted(index=index):
                assert open_message is None
                assert index == count
                open_message, text, count = index, "", count + 1
            case ContentDelta(index=index):
                assert index == open_message
                if event.tokens:
                    assert event.first >= last_end
                assert all(token < FIRST_CONTROL for token in ids[event.first : event.first + event.tokens])
                text, last_end = text + event.text, event.first + event.tokens
            case MessageEnded(index=index):
                assert index == open_message
                assert event.text == text
                if not cut:
                    assert event.ended_by is not EndedBy.CUT
                open_message = None
    assert open_message is None


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(any_token, max_size=20), text=st.text(max_size=80))
def test_text_after_a_good_header_is_exactly_the_content(ids: list[list[int]], text: str) -> None:
    """A well-formed final message is read exactly, after any other tokens."""
    before = [token for part in ids for token in part]
    answer = HarmonyParser(TOOLS)
    answer.feed(before)
    answer.feed(tokens("<|end|>"))
    events = answer.feed(tokens("<|start|>assistant<|channel|>final<|message|>"))
    started = [event for event in events if isinstance(event, MessageStarted)]
    assert started
    assert started[-1].channel == "final"
    assert started[-1].recipient is None
    events = answer.feed(encode(text)) + answer.feed(tokens("<|return|>"))
    (ended,) = [event for event in events if isinstance(event, MessageEnded)]
    assert ended.text == text


def test_a_call_that_is_cut_at_any_token_is_never_a_whole_one() -> None:
    ids = tokens(
        "<|channel|>analysis<|message|>Let me see 👩‍🚀<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get_weather <|constrain|>json<|message|>{"city": "Ulm"}<|call|>'
    )
    for length in range(len(ids) + 1):
        ended = [event for event in parse(ids[:length], cut=True) if isinstance(event, MessageEnded)]
        whole = [event for event in ended if event.index == 1 and event.ended_by is not EndedBy.CUT]
        assert len(whole) == (length == len(ids))


@pytest.mark.parametrize("loop", ["<|start|>", "<|channel|>", "<|start|>assistant", "<|constrain|>json", "<|start|>a"])
@pytest.mark.parametrize("before", ["", "<|channel|>analysis<|message|>a"])
def test_a_model_in_a_loop_costs_no_more_a_token(loop: str, before: str) -> None:
    """A header that grew without end would be read whole at every token: 20,000 tokens would take minutes, not 1 s."""
    ids = tokens(before) + tokens(loop) * (20_000 // len(tokens(loop)))
    began = time.process_time()
    assert transcript(parse(ids)) == spelled(ids)
    assert time.process_time() - began < 10


def _random_stream(rng: random.Random, word_ids: list[list[int]]) -> list[int]:
    ids: list[int] = []
    for _ in range(rng.randrange(12)):
        ids += rng.choice(word_ids) if rng.random() < 0.8 else [rng.randrange(201_200)]
    return ids


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_million_random_streams_never_raise() -> None:
    """Short streams of control tokens, header words, partial characters and random ids; the seed is fixed, and a sample
    is the first of the million."""
    rng = random.Random(20251120)
    word_ids = [tokens(word) for word in WORDS]
    for number in range(scale.count(1_000_000, 10_000)):
        ids = _random_stream(rng, word_ids)
        parser = HarmonyParser(TOOLS)
        events = parser.feed(ids) + parser.finish(bool(number & 1))
        if number % 100 == 0:
            assert transcript(events) == spelled(ids)
