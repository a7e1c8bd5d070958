"""Compares streams of the completions handler with vLLM's: the same results of the engine must give the same bytes."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.hand_fed import asking, client
from tests.support.streamed import (
    COMPLETIONS,
    body_of,
    completion_frames,
    completion_handlers,
    completion_request,
    handler_app,
    text_of,
    without_made_up,
)
from vllm_gptoss.server.chat import completions
from vllm_gptoss.server.harmony.tokens import encode

pytestmark = pytest.mark.vllm

Part = tuple[str, Sequence[int]]
"""The text and the tokens of one result."""


@pytest.fixture(scope="module")
def handlers() -> tuple[Any, Any]:
    return completion_handlers()


class Engine:
    """Results of one request, one of each of `parts`; `fails` after the last."""

    def __init__(self, parts: Sequence[Part], finish: str | None = "stop", fails: Exception | None = None):
        self._parts, self._finish, self._fails = parts, finish, fails
        self.is_closed = False

    async def __call__(self) -> AsyncIterator[Any]:
        from vllm.outputs import CompletionOutput, RequestOutput

        try:
            for number, (text, ids) in enumerate(self._parts, 1):
                reason = self._finish if number == len(self._parts) and not self._fails else None
                choice = CompletionOutput(0, text, list(ids), None, None, finish_reason=reason)
                yield RequestOutput("r", "hi", [1, 2, 3], None, [choice], reason is not None, num_cached_tokens=1)
                await asyncio.sleep(0)
            if self._fails:
                raise self._fails
        finally:
            self.is_closed = True


def frames(handler: Any, engine: Engine, request: Any) -> tuple[str, Any]:
    """All frames of the stream, and the usage that was counted."""
    metadata = SimpleNamespace(final_usage_info=None)

    async def read() -> list[str]:
        stream = completion_frames(handler, request, engine(), "cmpl-1", metadata)
        return [frame.decode() if isinstance(frame, bytes) else frame async for frame in stream]

    return "".join(asyncio.run(read())), metadata.final_usage_info


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
def test_every_stream_has_the_bytes_of_vllms_own(
    handlers: tuple[Any, Any], said: list[Part], finish: str, fields: dict[str, Any]
) -> None:
    theirs, ours = handlers
    want, counted = frames(theirs, Engine(said, finish), completion_request(stream=True, **fields))
    got, also = frames(ours, Engine(said, finish), completion_request(stream=True, **fields))
    assert got == want
    assert also == counted


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_failure_of_the_engine_is_told_as_vllm_tells_it(handlers: tuple[Any, Any], after: int) -> None:
    theirs, ours = handlers
    said = [(" word", [7])] * after
    want, _ = frames(theirs, Engine(said, fails=RuntimeError("dead")), completion_request(stream=True))
    got, _ = frames(ours, Engine(said, fails=RuntimeError("dead")), completion_request(stream=True))
    assert got == want
    assert '"error"' in got


def test_a_client_that_goes_away_ends_the_request(handlers: tuple[Any, Any]) -> None:
    engine = Engine([(" word", [7])] * 9)

    async def leave() -> None:
        stream = completion_frames(
            handlers[1], completion_request(stream=True), engine(), "c", SimpleNamespace(final_usage_info=None)
        )
        for _ in range(3):
            await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(10):
            while not engine.is_closed:
                await asyncio.sleep(0.01)

    asyncio.run(leave())


def test_what_is_more_than_the_text_of_one_prompt_is_left_to_vllm(handlers: tuple[Any, Any]) -> None:
    plain = handlers[1]._is_plain
    assert plain(completion_request(stream=True, stop=["x"], stream_options={"include_usage": True}))
    for fields in ({"n": 2}, {"logprobs": 0}, {"echo": True}, {"return_token_ids": True}, {"use_beam_search": True}):
        assert not plain(completion_request(stream=True, **fields)), fields
    two = handlers[1].completion_stream_generator(
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
