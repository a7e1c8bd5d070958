"""Compares streams of the completions handler with vLLM's: the same results of the engine must give the same bytes."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chat_requests import request_of
from tests.support.hand_fed import asking, client
from tests.support.streamed import (
    CHAT,
    COMPLETIONS,
    Results,
    body_of,
    both_frames,
    completion_handlers,
    completion_request,
    handler_app,
    handlers_of,
    text_of,
    without_made_up,
)
from vllm_gptoss.server.chat import completions
from vllm_gptoss.server.harmony.tokens import encode

pytestmark = pytest.mark.vllm

Part = tuple[str, Sequence[int]]
"""The text and the tokens of one result."""


texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    st.sampled_from(["", ' "quoted" \\ ', '"text":"no"', "\n\t\x00\x1f\x7f", "\u2028</script>", "好👍🏽"]),
)
ids = st.integers(0, 200_000)
parts = st.lists(st.tuples(texts, st.lists(ids, min_size=1, max_size=3)), min_size=1, max_size=12)
last = st.lists(st.just(("", ())), max_size=1)  # an end may come without tokens, as of an abort
options = st.fixed_dictionaries(
    {},
    optional={
        "stream_options": st.sampled_from(
            [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
        ),
        "return_token_ids": st.booleans(),
        "echo": st.booleans(),
    },
)


@settings(max_examples=200, deadline=None)
@given(st.builds(list.__add__, parts, last), st.sampled_from(["stop", "length", "abort", "error"]), options)
def test_every_stream_has_the_bytes_of_vllms_own(said: list[Part], finish: str, fields: dict[str, Any]) -> None:
    want, got = both_frames(
        COMPLETIONS, lambda: Results(said, finish), lambda: completion_request(stream=True, **fields)
    )
    assert got == want


def test_what_is_more_than_the_text_of_one_prompt_is_left_to_vllm() -> None:
    more: list[dict[str, Any]] = [{"n": 2}, {"echo": True}, {"return_token_ids": True}, {"use_beam_search": True}]
    for path, request, logprobs in ((CHAT, request_of, True), (COMPLETIONS, completion_request, 0)):
        ours = handlers_of(path)[1]
        assert ours._is_plain(request(stream=True))
        assert ours._is_plain(request(stream=True, n=1, stop=["x"], stream_options={"include_usage": True}))
        for fields in (*more, {"logprobs": logprobs}):
            assert not ours._is_plain(request(stream=True, **fields)), fields
    two = ours.completion_stream_generator(
        completion_request(stream=True), [{}, {}], None, "c", 7, "m", 2, None, request_metadata=None
    )
    assert not isinstance(two, completions.Frames)


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_a_stream_whose_text_goes_straight(include: bool) -> None:
    """vLLM holds back text that may begin the stop string, and still searches for it."""
    turn = encode("one two STAY three STOP four")

    async def streamed(is_direct: bool) -> tuple[bytes, Any]:
        engine = client()
        app = handler_app(
            COMPLETIONS, engine, is_direct=is_direct, stop=["STOP"], include_stop_str_in_output=include,
            stream_options={"include_usage": True},
        )  # fmt: skip
        async with asking(app, engine, COMPLETIONS, body_of(COMPLETIONS)) as reader:
            await engine.tell(turn)
            return await reader.rest(), engine

    short, quick = await streamed(True)
    long, _ = await streamed(False)
    assert without_made_up(short) == without_made_up(long)
    assert text_of(COMPLETIONS, short) == "one two STAY three " + "STOP" * include
    assert b'"stop_reason":"STOP"' in short
    assert quick.queued == 2, "the first and the last"


@pytest.mark.parametrize(("host", "streams"), [("auto", True), ("stock", False)])
async def test_the_setting_that_leaves_all_to_vllm_does(host: str, streams: bool) -> None:
    from vllm.entrypoints.openai.completion.api_router import attach_router

    app = FastAPI()
    attach_router(app)
    before = len(app.routes)
    part = completions.Completions()
    part.attach(app, Namespace(), SimpleNamespace(host=host))
    assert len(app.routes) == before + streams
    state = SimpleNamespace(openai_serving_completion=completion_handlers()[0])
    await part.start(None, state, Namespace())
    assert isinstance(state.openai_serving_completion, completions.CompletionStream) == streams


async def test_a_vllm_without_the_route_serves_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    part = completions.Completions()
    with caplog.at_level(logging.WARNING):
        part.attach(FastAPI(), Namespace(), SimpleNamespace(host="auto"))
    assert "no such route" in caplog.text
    state = SimpleNamespace(openai_serving_completion=completion_handlers()[0])
    await part.start(None, state, Namespace())
    assert not isinstance(state.openai_serving_completion, completions.CompletionStream)
