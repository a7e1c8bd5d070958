"""Text that is sent directly: the bytes, order and ends of streams equal those of vLLM's path.

The tests run vLLM's own output processing, queues and `generate` behind vLLM's web server, on sockets. The test takes
the place of the engine, so that it controls when each token comes.
"""

from __future__ import annotations

import asyncio
import logging
import re
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from tests.support.chat_requests import ASK, THINK, WEATHER
from tests.support.hand_fed import asking, client
from tests.support.harmony_streams import tokens
from tests.support.streamed import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    Wraps,
    app_of,
    body_of,
    handler_app,
    responses_app,
    text_of,
    without_made_up,
)
from tests.support.waiting import until
from vllm_gptoss.server.chat import completions
from vllm_gptoss.server.chat.chat import ChatReader
from vllm_gptoss.server.responses.endpoint import ResponsesEndpoint
from vllm_gptoss.server.streaming import direct_send

pytestmark = pytest.mark.vllm

ANSWER = "<|channel|>final<|message|>It is 21 °C, 「はい」, 👍🏽 and more than that.<|return|>"
TURN = tokens(THINK + ANSWER)
LONG = tokens("<|channel|>final<|message|>" + " word" * 20_000 + "<|return|>")
TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER["function"]["parameters"]}  # type: ignore[index]


Path = pytest.mark.parametrize("path", [CHAT, RESPONSES, COMPLETIONS])


def said(path: str, text: str, before: str = "final") -> str:
    """The text of an answer at `path`: completions also return headers and reasoning."""
    return f"{before}{text}" if path == COMPLETIONS else text


ALL_OF_TURN = ("It is 21 °C, 「はい」, 👍🏽 and more than that.", "analysisLet me think.assistantfinal")


async def streamed(path: str, is_direct: bool, work: Callable[[Any], Any], **asked: Any) -> tuple[bytes, Any]:
    engine = client()
    async with asking(await app_of(path, engine, is_direct=is_direct), engine, path, body_of(path, **asked)) as reader:
        await work(engine)
        return await reader.rest(), engine


@Path
@pytest.mark.parametrize(
    ("turn", "asked"),
    [
        (TURN, {}),
        (tokens(THINK + ASK), {"tools": True}),
        (tokens(THINK + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + ASK), {"tools": True}),
        (tokens("no header at all, and <|start|> in it<|return|>"), {}),
        (tokens(THINK + "<|channel|>analysis<|message|>And more.<|end|><|start|>assistant" + ANSWER), {}),
        (tokens("<|channel|>final<|message|>cut")[:-1], {}),
    ],
)
async def test_both_ways_give_the_same_bytes(path: str, turn: list[int], asked: Any) -> None:
    if asked:
        asked = {} if path == COMPLETIONS else {"tools": [WEATHER if path == CHAT else TOOL]}
    long, slow = await streamed(path, False, lambda engine: engine.tell(turn), **asked)
    short, quick = await streamed(path, True, lambda engine: engine.tell(turn), **asked)
    assert without_made_up(short) == without_made_up(long)
    assert slow.queued == len(turn)
    assert quick.queued <= slow.queued


@pytest.mark.parametrize(
    "field", [{"stream_options": {"include_obfuscation": True}}, {"reasoning": {"summary": "auto"}}]
)
@pytest.mark.parametrize("path", [RESPONSES, "/v1/openresponses/responses"])
async def test_both_ways_name_pad_and_summarise_alike(path: str, field: dict[str, Any]) -> None:
    async def read(is_direct: bool) -> str:
        engine = client()
        async with asking(
            await responses_app(engine, is_direct=is_direct), engine, path, body_of(RESPONSES, **field)
        ) as reader:
            await engine.tell(TURN)
            return re.sub('"obfuscation":"[0-9a-f]{1,16}"', "", without_made_up(await reader.rest()))

    long, short = await read(False), await read(True)
    assert short == long
    assert ("response.reasoning.delta" in short) == (path != RESPONSES)


@Path
async def test_a_citation_in_the_text_is_resolved_or_kept(path: str) -> None:
    turn = tokens("<|channel|>final<|message|>As said【3†L10-L12】 and 【so on】 there.<|return|>")
    long, _ = await streamed(path, False, lambda engine: engine.tell(turn))
    short, _ = await streamed(path, True, lambda engine: engine.tell(turn))
    assert without_made_up(short) == without_made_up(long)


@Path
async def test_text_needs_no_task(path: str) -> None:
    """All but the control tokens, the words of headers, and the first text of a message goes past the queue."""
    body, engine = await streamed(path, True, lambda engine: engine.tell(LONG[:500], "length"))
    assert text_of(path, body) == said(path, " word" * 497)
    assert engine.queued <= 6


@Path
async def test_order_stays_where_tokens_come_in_bursts(path: str) -> None:
    async def work(engine: Any) -> None:
        for number, token in enumerate(TURN, 1):
            engine.say(token, finish="stop" if number == len(TURN) else None)
            if number % 5 == 0:
                await asyncio.sleep(0.001 * (number % 2))

    body, _ = await streamed(path, True, work)
    assert text_of(path, body) == said(path, *ALL_OF_TURN)


@Path
async def test_several_tokens_in_a_step(path: str) -> None:
    """Several tokens a step, as with drafts; characters are split between steps."""

    async def work(engine: Any) -> None:
        for at in range(0, len(TURN), 3):
            engine.say(*TURN[at : at + 3], finish="stop" if at + 3 >= len(TURN) else None)
            await asyncio.sleep(0.001)

    body, engine = await streamed(path, True, work)
    assert text_of(path, body) == said(path, *ALL_OF_TURN)
    assert engine.queued < len(TURN) / 3


@pytest.mark.slow
@Path
async def test_a_slow_reader_holds_up_no_other_and_gets_all(path: str) -> None:
    engine = client()
    async with asking(await app_of(path, engine), engine, path, body_of(path), buffer=4096) as slow:
        for token in LONG[:-1]:
            engine.say(token)
            await asyncio.sleep(0)
        (state,) = engine.output_processor.request_states.values()
        assert state.queue.output is not None, "what the reader does not take waits in the request's queue"
        waiting = len(state.queue.output.outputs[0].token_ids)
        assert waiting > 5_000, "and nowhere else"
        engine.say(LONG[-1], finish="stop")
        assert text_of(path, await slow.rest()) == said(path, " word" * 20_000)


@Path
async def test_a_reader_that_leaves_ends_its_request(path: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = client()
    async with asking(await app_of(path, engine), engine, path, body_of(path)) as reader:
        await engine.tell(LONG[:100], None)
        await reader.read()
        reader.leave()
        said = 0
        while engine.output_processor.request_states:
            engine.say(LONG[10])
            said += 1
            await asyncio.sleep(0.005)
        assert said <= 8
        assert len(engine.aborted) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@Path
async def test_a_reader_that_leaves_a_full_socket_ends_its_request(path: str) -> None:
    engine = client()
    async with asking(await app_of(path, engine), engine, path, body_of(path), buffer=4096) as reader:
        await engine.tell(LONG[:3], None)
        for token in LONG[3:15_000]:
            engine.say(token)
        await asyncio.sleep(0.05)
        reader.leave()
        await until(lambda: not engine.output_processor.request_states)
        assert len(engine.aborted) == 1


@Path
async def test_a_failure_of_the_engine_comes_after_the_text(path: str) -> None:
    async def work(engine: Any) -> None:
        await engine.tell(LONG[:50], None)
        engine.output_processor.propagate_error(RuntimeError("dead"))

    short, quick = await streamed(path, True, work)
    long, _ = await streamed(path, False, work)
    assert without_made_up(short) == without_made_up(long)
    assert text_of(path, short) == said(path, " word" * 47)
    assert b"error" in short
    assert quick.queued < 10


@Path
async def test_our_own_failure_steps_aside(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_gptoss.server.responses.run.listener import Listener

    calls = []

    def fails(*_: Any) -> Any:
        calls.append(1)
        raise RuntimeError("ours")

    monkeypatch.setattr(ChatReader, "next_text", fails)
    monkeypatch.setattr(Listener, "tell", fails)
    monkeypatch.setattr(completions._Told, "take", fails)
    with caplog.at_level(logging.ERROR):
        body, _ = await streamed(path, True, lambda engine: engine.tell(LONG[:50], "length"))
    assert text_of(path, body) == said(path, " word" * 47)
    assert len(calls) == 1, "once for each stream"
    assert [
        record.getMessage() for record in caplog.records if record.name == "vllm_gptoss.server.streaming.direct_send"
    ] == ["vLLM sends this stream's text, because the direct path failed"]


@Path
async def test_a_vllm_that_has_moved_things_serves_as_ever(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def moved(*_: Any) -> None:
        raise AttributeError("no such queue")

    direct_send._warn_once.cache_clear()
    monkeypatch.setattr(direct_send.replaced, "use_request_output", moved)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            body, engine = await streamed(path, True, lambda engine: engine.tell(TURN))
            assert text_of(path, body) == said(path, *ALL_OF_TURN)
            assert engine.queued == len(TURN)
    assert [
        record.getMessage() for record in caplog.records if record.name == "vllm_gptoss.server.streaming.direct_send"
    ] == ["vLLM sends streamed text: AttributeError: no such queue"]


@Path
async def test_a_middleware_that_sends_in_its_own_time(path: str) -> None:
    engine = client()
    app = await app_of(path, engine)
    app.add_middleware(Wraps)
    async with asking(app, engine, path, body_of(path)) as reader:
        await engine.tell(LONG[:100], "length", 0.0002)
        assert text_of(path, await reader.rest()) == said(path, " word" * 97)


@Path
async def test_a_middleware_that_fails_ends_the_request(path: str) -> None:
    engine = client()
    app = await app_of(path, engine)
    app.add_middleware(_Breaks)
    async with asking(app, engine, path, body_of(path)):
        async with asyncio.timeout(60):
            for token in LONG:
                engine.say(token)
                await asyncio.sleep(0.001)
                if not engine.output_processor.request_states:
                    break
        assert len(engine.aborted) == 1


class _Breaks:
    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sent = []

        async def breaks(message: Any) -> None:
            sent.append(message)
            if len(sent) > 20:
                raise RuntimeError("no more")
            await send(message)

        await self._app(scope, receive, breaks)


async def test_what_is_looked_at_beside_text_takes_the_long_way() -> None:
    more = ({"n": 2}, {"return_token_ids": True})
    for path, fields in [(CHAT, {"stop": ["xyz"]}), *((path, each) for path in (CHAT, COMPLETIONS) for each in more)]:
        engine = client()
        async with asking(handler_app(path, engine, **fields), engine, path, body_of(path)) as reader:
            await engine.tell(TURN)
            await reader.rest()
            assert engine.queued == len(TURN), fields


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_request_that_ends_leaves_nothing_behind(path: str) -> None:
    engine = client()
    async with asking(handler_app(path, engine), engine, path, body_of(path)) as reader:
        (state,) = engine.output_processor.request_states.values()
        await engine.tell(TURN[:-1], None)
        assert "make_request_output" in vars(state)
        await engine.tell(TURN[-1:])
        await reader.rest()
        assert "make_request_output" not in vars(state)


@pytest.mark.parametrize(("host", "is_direct"), [("auto", True), ("stock", False)])
def test_the_setting_that_leaves_all_to_vllm_does(host: str, is_direct: bool) -> None:
    endpoint = ResponsesEndpoint()
    settings = SimpleNamespace(store="off", strict_tools=True, prompts="", tools=None, host=host, ui=False)
    endpoint.attach(FastAPI(), Namespace(), settings)
    assert endpoint._is_direct == is_direct
