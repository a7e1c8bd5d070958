"""Failures of a server: each has a name, and retries and waits end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cli.eval.server import Plan, Raw, Reply, Words, events, serving
from tests.support.places import CACHE, ROOT
from tests.support.responses.frameworks import HOW
from vllm_gptoss.cli.eval.client import APIS, EvalClient, LostSampleError
from vllm_gptoss.cli.eval.judge import Answer, Outcome

SSE = {"content-type": "text/event-stream"}


async def once(url: str, api: str) -> Answer | LostSampleError:
    """Two tries, 2 seconds for the answer, half a second without a byte."""
    limits = openai.Timeout(None, connect=5.0, read=0.5)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=1, timeout=limits) as http:
        client = EvalClient(http, APIS[api], {"model": "m"}, 100, 2.0)
        try:
            return await client.ask([{"role": "user", "content": "hi"}], (), None, "low", {})
        except LostSampleError as lost:
            return lost


def ask(plan: Plan, api: str = "responses") -> tuple[Any, int]:
    """(the answer or how it was lost, requests that the server got)."""
    with serving(plan) as served:
        found = asyncio.run(once(served.api, api))
        return found, len(served.app.bodies)


WORDS = Words('Hello "wörld" 👋', "I greet.", [("f", '{"a": 1}'), ("g", "{}")], tokens=9)


@pytest.mark.parametrize("api", APIS)
def test_a_whole_answer_is_read_with_all_its_parts(api: str) -> None:
    answer, count = ask(lambda body, before: WORDS, api)
    assert (answer.text, answer.reasoning, answer.cut, count) == (WORDS.text, "I greet.", False, 1)
    assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"a": 1}'), ("g", "{}")]
    assert answer.tokens == 9


@pytest.mark.parametrize("api", APIS)
def test_an_answer_that_was_cut_says_so(api: str) -> None:
    answer, _ = ask(lambda body, before: Words("The answ", cut=True), api)
    assert (answer.cut, answer.text) == (True, "The answ")


def status(code: int) -> Raw:
    return Raw([b'{"error": {"message": "because"}}'], code, {"content-type": "application/json"})


def event(data: Any) -> Raw:
    return Raw([f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()], headers=SSE)


FAILURE = {"status": "failed", "output": [], "error": {"code": "invalid_prompt", "message": "no"}}
LOST: dict[str, tuple[Reply, Outcome, int, str]] = {
    "400": (status(400), Outcome.REFUSED, 1, "because"),
    "401": (status(401), Outcome.REFUSED, 1, "401"),
    "429": (status(429), Outcome.REFUSED, 2, "429"),
    "500": (status(500), Outcome.FAILED, 2, "500"),
    "no answer": (Raw([], end="hang"), Outcome.TIMED_OUT, 1, "timed out"),
    "slow": (Raw(events(WORDS, False), headers=SSE, pause_s=0.4), Outcome.TIMED_OUT, 1, "no answer after 2"),
    "stalled": (Raw(events(WORDS, False)[:2], headers=SSE, end="hang"), Outcome.TIMED_OUT, 1, "timed out"),
    "bytes for ever": (Raw([b":\n"], headers=SSE, end="drip"), Outcome.TIMED_OUT, 1, "no answer after 2"),
    "connection cut": (Raw(events(WORDS, False)[:3], headers=SSE, end="cut"), Outcome.BROKEN, 1, "onnection"),
    "stream without end": (Raw(events(WORDS, False)[:-1], headers=SSE), Outcome.BROKEN, 1, "ended before its answer"),
    "nothing at all": (Raw([]), Outcome.BROKEN, 1, "ended before its answer"),
    "no stream": (Raw([b"<html>hello</html>"]), Outcome.BROKEN, 1, "ended before its answer"),
    "event without JSON": (event("{"), Outcome.BROKEN, 1, "not a stream of /responses"),
    "deep JSON": (event("[" * 200_000), Outcome.BROKEN, 1, "not a stream"),
    "a list": (event([1]), Outcome.BROKEN, 1, "not a stream"),
    "another object": (event({"type": "response.completed"}), Outcome.BROKEN, 1, "not a stream"),
    "error event": (event({"type": "error", "message": "lost engine"}), Outcome.FAILED, 1, "lost engine"),
    "invalid prompt": (event({"type": "response.failed", "response": FAILURE}), Outcome.REFUSED, 1, "invalid_prompt"),
}


@pytest.mark.parametrize("name", LOST)
def test_every_loss_has_its_name_and_a_bound(name: str) -> None:
    reply, outcome, requests, words = LOST[name]
    began = time.monotonic()
    lost, count = ask(lambda body, before: reply)
    assert isinstance(lost, LostSampleError), lost
    assert (lost.outcome, count) == (outcome, requests), lost
    assert words in str(lost)
    assert len(str(lost)) < 1000
    assert time.monotonic() - began < 30


CHAT_LOST: dict[str, tuple[Raw, Outcome]] = {
    "error chunk": (event({"error": {"message": "bad", "code": 500}}), Outcome.FAILED),
    "no choices": (event({"id": 3}), Outcome.BROKEN),
    "choices of numbers": (event({"choices": [3]}), Outcome.BROKEN),
    "no finish reason": (event({"choices": [{"delta": {"content": "a"}}]}), Outcome.BROKEN),
    "calls without number": (event({"choices": [{"delta": {"tool_calls": [{}]}}]}), Outcome.BROKEN),
}


@pytest.mark.parametrize("name", CHAT_LOST)
def test_a_chat_stream_that_is_none_is_lost(name: str) -> None:
    reply, outcome = CHAT_LOST[name]
    lost, _ = ask(lambda body, before: reply, "chat")
    assert isinstance(lost, LostSampleError), lost
    assert lost.outcome is outcome


def test_what_helps_to_try_again_is_tried_again() -> None:
    answer, count = ask(lambda body, before: WORDS if before else status(503))
    assert (answer.text, count) == (WORDS.text, 2)


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, but not listening
        lost = asyncio.run(once(f"http://127.0.0.1:{held.getsockname()[1]}/v1", "chat"))
    assert isinstance(lost, LostSampleError)
    assert (lost.outcome, "onnect" in str(lost)) == (Outcome.BROKEN, True)


def test_content_may_be_null_and_usage_missing() -> None:
    chunk = {"choices": [{"delta": {"content": None}, "finish_reason": "stop"}]}
    answer, _ = ask(lambda body, before: event(chunk), "chat")
    assert (answer.text, list(answer.calls), answer.tokens) == ("", [], 0)


@pytest.mark.slow
@pytest.mark.skipif("GPTOSS_OPENAI_FLOOR" in os.environ, reason="runs in itself")
def test_the_oldest_client_that_may_be_installed_behaves_the_same() -> None:
    home = CACHE / "clients-py" / "openai_floor"
    if not (home / "digest").exists():
        pytest.skip(f"no oldest openai: {HOW}")
    declared = re.search(r'"openai>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    (site,) = home.glob("lib/python*/site-packages")
    assert declared
    assert list(site.glob(f"openai-{declared[1]}*.dist-info"))
    code = "import openai, pytest, sys; print(openai.__version__); sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "-q", "-n0", "-p", "no:cacheprovider", str(Path(__file__))]
    environ = {**os.environ, "PYTHONPATH": str(site), "GPTOSS_OPENAI_FLOOR": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert ran.stdout.startswith(declared[1])
