"""Failures of a server: each has a name, retries end, and memory is bounded."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from typing import Any

import pytest

from tests.cli.eval.server import Plan, Raw, Reply, Words, completion, events, response, serving
from vllm_gptoss.cli.eval import client as client_module
from vllm_gptoss.cli.eval.apis import APIS, Fate, LostSampleError, ModelAnswer, RequestSettings
from vllm_gptoss.cli.eval.client import AskLimits, EvalClient

SSE = {"content-type": "text/event-stream"}
QUICK = AskLimits(timeout_s=2.0, idle_s=0.5, tries=3)
PATIENT = AskLimits(timeout_s=120.0, idle_s=120.0, tries=3)
"""Where a bound in bytes ends an answer: no machine is so slow that time does."""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries a hundred times shorter: their length is tested on its own."""
    monkeypatch.setattr(client_module, "MAX_WAIT_S", 0.02)


def ask(plan: Plan, api: str = "responses", stream: bool = True, limits: AskLimits = QUICK) -> tuple[Any, int]:
    """(the answer or how it was lost, requests that the server got)."""

    async def once(url: str) -> ModelAnswer | LostSampleError:
        way = APIS[api]()
        body = way.body([{"role": "user", "content": "hi"}], (), None, "low", RequestSettings("m", 100, stream=stream))
        async with EvalClient(url, way, limits, at_once=1) as client:
            try:
                return await client.ask(body)
            except LostSampleError as lost:
                return lost

    with serving(plan) as served:
        found = asyncio.run(once(served.api))
        return found, len(served.app.bodies)


WORDS = Words('Hello "wörld" 👋', "I greet.", [("f", '{"a": 1}'), ("g", "{}")], tokens=(7, 9, 3))


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("api", APIS)
def test_a_whole_answer_is_read_with_all_its_parts(api: str, stream: bool) -> None:
    answer, count = ask(lambda body, before: WORDS, api, stream)
    assert (answer.text, answer.reasoning, answer.cut, answer.tries, count) == (WORDS.text, "I greet.", False, 1, 1)
    assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"a": 1}'), ("g", "{}")]
    assert answer.tokens == (7, 9, 3)
    assert 0 < answer.first_s <= answer.seconds


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("api", APIS)
def test_an_answer_that_was_cut_says_so(api: str, stream: bool) -> None:
    answer, _ = ask(lambda body, before: Words("The answ", cut=True), api, stream)
    assert answer.cut
    assert answer.text == "The answ"


def test_a_server_that_streams_though_nobody_asked_is_read_and_the_other_way_round() -> None:
    whole = Raw([json.dumps(response(WORDS)).encode()], headers={"content-type": "application/json"})
    assert ask(lambda body, before: whole)[0].text == WORDS.text
    assert ask(lambda body, before: Raw(events(WORDS, True), headers=SSE), "chat", stream=False)[0].text == WORDS.text


def status(code: int, **headers: str) -> Raw:
    return Raw([b'{"error": {"message": "because"}}'], code, headers)


LOST: dict[str, tuple[Reply, Fate, int, str]] = {
    "400": (status(400), Fate.REFUSED, 1, "because"),
    "401": (status(401), Fate.REFUSED, 1, "HTTP 401"),
    "404": (status(404), Fate.REFUSED, 1, "HTTP 404"),
    "302": (status(302, location="/other"), Fate.REFUSED, 1, "HTTP 302"),
    "429": (status(429), Fate.REFUSED, 3, "HTTP 429"),
    "500": (status(500), Fate.FAILED, 3, "HTTP 500"),
    "503": (status(503), Fate.FAILED, 3, "HTTP 503"),
    "no answer": (Raw([], end="hang"), Fate.TIMED_OUT, 1, "no answer after"),
    "slow": (Raw(events(WORDS, False), headers=SSE, pause_s=0.45), Fate.TIMED_OUT, 1, "no answer after"),
    "stalled": (Raw(events(WORDS, False)[:2], headers=SSE, end="hang"), Fate.TIMED_OUT, 1, "no answer after"),
    "bytes for ever": (Raw([b":\n"], headers=SSE, end="drip"), Fate.TIMED_OUT, 1, "no answer after 2"),
    "connection cut": (Raw(events(WORDS, False)[:3], headers=SSE, end="cut"), Fate.BROKEN, 3, ""),
    "stream without end": (Raw(events(WORDS, False)[:-1], headers=SSE), Fate.BROKEN, 3, "ended before its answer"),
    "nothing at all": (Raw([]), Fate.BROKEN, 3, "no JSON"),
    "no JSON": (Raw([b"<html>hello</html>"]), Fate.BROKEN, 3, "<html>"),
    "event without JSON": (Raw([b"event: response.completed\ndata: {\n\n"], headers=SSE), Fate.BROKEN, 3, "no JSON"),
    "deep JSON": (Raw([b"[" * 200_000]), Fate.BROKEN, 3, "no JSON"),
    "huge number": (Raw([b"1" * 5000]), Fate.BROKEN, 3, "no JSON"),
    "another object": (Raw([b'{"output": "text"}']), Fate.BROKEN, 1, "no response object"),
    "a list": (Raw([b"[1]"]), Fate.BROKEN, 1, "no response object"),
    "compressed": (Raw([gzip.compress(b"{}")], headers={"content-encoding": "gzip"}), Fate.BROKEN, 1, "compressed"),
    "error event": (Raw([b'event: error\ndata: {"type": "error", "message": "lost engine"}\n\n'], headers=SSE),
                    Fate.FAILED, 3, "lost engine"),
    "invalid prompt": (
        Raw([b'data: {"type": "response.failed", "response": {"status": "failed", "output": [], "error":'
             b' {"code": "invalid_prompt", "message": "no"}}}\n\n'], headers=SSE), Fate.REFUSED, 1, "invalid_prompt"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_every_loss_has_its_name_and_a_bound(name: str) -> None:
    reply, fate, requests, words = LOST[name]
    began = time.monotonic()
    lost, count = ask(lambda body, before: reply)
    assert isinstance(lost, LostSampleError), lost
    assert (lost.fate, count, lost.tries) == (fate, requests, requests)
    assert words in lost.detail
    assert len(lost.detail) < 1000
    assert time.monotonic() - began < 30


CHAT_LOST: dict[str, tuple[bytes, Fate]] = {
    "error chunk": (b'data: {"error": {"message": "bad", "code": 500}}\n\n', Fate.FAILED),
    "refusal chunk": (b'data: {"error": {"message": "bad", "code": 400}}\n\n', Fate.REFUSED),
    "no choices": (b'data: {"id": 3}\n\n', Fate.BROKEN),
    "choices of numbers": (b'data: {"choices": [3]}\n\n', Fate.BROKEN),
    "a number": (b"data: 3\n\n", Fate.BROKEN),
    "no finish reason": (b'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: [DONE]\n\n', Fate.BROKEN),
    "calls without number": (b'data: {"choices": [{"delta": {"tool_calls": [{}]}}]}\n\n', Fate.BROKEN),
}


@pytest.mark.parametrize("name", CHAT_LOST)
def test_a_chat_stream_that_is_none_is_lost(name: str) -> None:
    data, fate = CHAT_LOST[name]
    lost, _ = ask(lambda body, before: Raw([data], headers=SSE), "chat")
    assert isinstance(lost, LostSampleError), lost
    assert lost.fate is fate


@pytest.mark.parametrize("api", APIS)
def test_an_answer_without_an_end_is_given_up_at_its_bound(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_EVENT", 1 << 20)
    monkeypatch.setattr(client_module, "MAX_STREAM", 4 << 20)
    megabyte = b"x" * (1 << 20)
    line = Raw([b"data: ", *[megabyte] * 3], headers=SSE, end="drip")
    many = Raw([b": " + megabyte[:1000] + b"\n"] * 5000, headers=SSE, end="drip")
    body = Raw([megabyte] * 3)
    for reply in (line, many, body):
        lost, count = ask(lambda body, before, reply=reply: reply, api, limits=PATIENT)  # type: ignore[misc]
        assert isinstance(lost, LostSampleError)
        assert (lost.fate, count) == (Fate.BROKEN, 1)
        assert "larger than" in lost.detail


def test_a_text_without_an_end_is_given_up_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_gptoss.cli.eval.apis.MAX_TEXT", 50_000)
    long = Words("x" * 60_000)
    for api in APIS:
        lost, _ = ask(lambda body, before: long, api, limits=PATIENT)
        assert isinstance(lost, LostSampleError)
        assert "longer than" in lost.detail


def test_what_helps_to_try_again_is_tried_again_and_counted() -> None:
    answer, count = ask(lambda body, before: status(503) if before < 2 else WORDS)
    assert (answer.text, answer.tries, count) == (WORDS.text, 3, 3)
    answer, count = ask(lambda body, before: Raw(events(WORDS, False)[:2], headers=SSE) if before < 1 else WORDS)
    assert (answer.text, answer.tries, count) == (WORDS.text, 2, 2)


@pytest.mark.parametrize(("header", "least"), [("1", 1.0), ("0", 0.0)])
def test_retry_after_is_kept(header: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_WAIT_S", 60.0)
    began = time.monotonic()
    answer, _ = ask(lambda body, before: WORDS if before else status(429, **{"retry-after": header}))
    assert answer.tries == 2
    assert least <= time.monotonic() - began < least + 3


@pytest.mark.parametrize("header", ["99999999999999999999", "Fri, 31 Dec 2199 23:59:59 GMT", "-5", "soon", "²", ""])
def test_no_retry_after_makes_it_wait_for_ever(header: str) -> None:
    answer, _ = ask(
        lambda body, before: WORDS if before else status(429, **{"retry-after": header.encode().decode("latin-1")})
    )
    assert answer.tries == 2


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, but not listening

        async def once() -> LostSampleError:
            url = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
            async with EvalClient(url, APIS["chat"](), QUICK, at_once=1) as client:
                with pytest.raises(LostSampleError) as lost:
                    await client.ask({})
                with pytest.raises(LostSampleError, match="Connect"):
                    await client.models()
                return lost.value

        lost = asyncio.run(once())
    assert (lost.fate, lost.tries) == (Fate.BROKEN, 3)
    assert "Connect" in lost.detail


def test_content_may_be_null_or_missing() -> None:
    silent = completion(Words())
    del silent["choices"][0]["message"]["content"], silent["usage"]
    answer, _ = ask(lambda body, before: Raw([json.dumps(silent).encode()]), "chat", stream=False)
    assert (answer.text, answer.calls, answer.tokens[1]) == ("", (), 0)
