"""A user's first hour: `vllm serve` with the plugin and the `openai` client."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from demo.server import NAME, Server
from vllm_gptoss.cli.bench import consistency

pytestmark = [pytest.mark.vllm, pytest.mark.serve, pytest.mark.timeout(600)]
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(served: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.api, api_key="none", timeout=120, max_retries=0)


@pytest.fixture
def parallel(served: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.api, api_key="none", timeout=300, max_retries=0)


def test_the_log_says_once_that_the_plugin_is_active_and_why(served: Server) -> None:
    lines = [line for line in served.log.read_text().splitlines() if re.search(r"vllm-gptoss \S+ is active", line)]
    assert len(lines) == 1
    assert "experts: " in lines[0]
    assert "(" in lines[0]


def test_chat_separates_reasoning_from_the_answer(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(model=NAME, messages=CAPITAL, temperature=0).choices[0]
    assert choice.message.content == "The capital of France is Paris."
    assert choice.message.model_extra["reasoning"] == "The capital of France is Paris."
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("stop", [None, " of"])
def test_a_stream_of_completions_adds_up_to_the_whole(client: openai.OpenAI, stop: str | None) -> None:
    def asked(**fields: Any) -> Any:
        return client.completions.create(
            model=NAME, prompt="The capital", max_tokens=24, temperature=0, stop=stop, **fields
        )

    whole = asked()
    *chunks, last = asked(stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])


def test_raw_completions(client: openai.OpenAI) -> None:
    done = client.completions.create(model=NAME, prompt="The capital of France is", temperature=0, max_tokens=8)
    assert done.choices[0].text.startswith(" Paris, and the capital of Germany")
    assert done.usage.completion_tokens == 8


async def test_32_at_once_get_32_right_answers(parallel: openai.AsyncOpenAI) -> None:
    questions = {
        "What is the capital of France?": "The capital of France is Paris.",
        "What is 2 + 2?": "2 + 2 = 4.",
        "Count from 1 to 10.": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
        "List three fruits.": "- apple\n- banana\n- cherry",
    }

    async def ask(number: int) -> bool:
        question, answer = list(questions.items())[number % len(questions)]
        if number % 2:
            response = await parallel.responses.create(model=NAME, input=question, temperature=0)
            return response.output_text == answer
        done = await parallel.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": question}], temperature=0
        )
        return done.choices[0].message.content == answer

    assert all(await asyncio.gather(*(ask(number) for number in range(32))))


def value(metrics: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(name + "{"))


def metric(server: Server, name: str) -> float:
    return value(httpx.get(f"{server.url}/metrics", timeout=30).text, name)


STORY, WHOLE = "Tell me a long story.", 4000
WHOLE_STORY: dict[str, dict[str, object]] = {
    path: {"model": NAME, "temperature": 0, "stream": True, "ignore_eos": True} | body
    for path, body in {
        "responses": {"input": STORY, "max_output_tokens": WHOLE, "stop_token_ids": []},
        "chat/completions": {"messages": [{"role": "user", "content": STORY}], "max_tokens": WHOLE},
        "completions": {"prompt": STORY, "max_tokens": WHOLE},
    }.items()
}
"""A request of each endpoint for all tokens, as a stream."""


@pytest.mark.parametrize("path", ["responses", "chat/completions"], ids=["responses", "chat"])
async def test_a_client_that_leaves_stops_the_generation(served: Server, path: str) -> None:
    """An engine that goes on without a client writes all tokens every time; on a machine with other work one may be
    through before it hears of it."""
    body = WHOLE_STORY[path]
    written = [await written_once_left(served, path, body)]
    while written[-1] > 0.9 * WHOLE and len(written) < 5:
        written.append(await written_once_left(served, path, body))
    assert 0 < written[-1] < 0.9 * WHOLE, written


async def written_once_left(served: Server, path: str, body: dict[str, object]) -> float:
    """Tokens that the engine generates for a client that leaves after 12 lines."""
    before = metric(served, "vllm:generation_tokens_total")
    async with httpx.AsyncClient(timeout=60) as http, http.stream("POST", f"{served.api}/{path}", json=body) as answer:
        lines = answer.aiter_lines()
        for _ in range(12):
            await anext(lines)
    left = time.monotonic()
    written = -1.0
    while written != (now := metric(served, "vllm:generation_tokens_total")) or metric(
        served, "vllm:num_requests_running"
    ):
        assert time.monotonic() - left < 60
        written = now
        await asyncio.sleep(0.2)
    return written - before


@pytest.mark.parametrize("path", WHOLE_STORY)
async def test_a_client_that_leaves_holds_the_engine_for_8_tokens_or_50_ms_at_most(served: Server, path: str) -> None:
    """The tokens of a concurrent stream are the clock. Other load delays both: the best of ten."""
    found = []
    async with httpx.AsyncClient(timeout=60) as http:
        for _ in range(10):
            beside = http.stream("POST", f"{served.api}/completions", json=WHOLE_STORY["completions"])
            leaves = http.stream("POST", f"{served.api}/{path}", json=WHOLE_STORY[path])
            found.append(await held_for(served, http, beside, leaves))
            if found[-1][0] <= 8 or found[-1][1] <= 0.05:
                return
    raise AssertionError(found)


async def held_for(
    served: Server,
    http: httpx.AsyncClient,
    beside: contextlib.AbstractAsyncContextManager[httpx.Response],
    leaves: contextlib.AbstractAsyncContextManager[httpx.Response],
) -> tuple[int, float]:
    """Tokens of the other stream, and seconds, until the engine runs that one alone."""
    heard = 0

    async def listen(lines: AsyncIterator[str]) -> None:
        nonlocal heard
        async for line in lines:
            heard += line.startswith("data: ")

    async with beside as other:
        listening = asyncio.create_task(listen(other.aiter_lines()))
        async with leaves as answer:
            lines = answer.aiter_lines()
            for _ in range(12):
                await anext(lines)
        had, left = heard, time.monotonic()
        while value((await http.get(f"{served.url}/metrics")).text, "vllm:num_requests_running") > 1:
            assert time.monotonic() - left < 60
        found = heard - had, time.monotonic() - left
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening
    while metric(served, "vllm:num_requests_running"):
        await asyncio.sleep(0.1)
    return found


def test_decode_and_prompts_of_the_server_agree(served: Server) -> None:
    """`vllm-gptoss bench consistency --url`."""
    load = consistency.Load((1, 4), 20, 8, 1000)
    for size in load.sizes:
        answers = asyncio.run(consistency.served(served.url, NAME, load, size))
        assert [len(answer.read) for answer in answers] == [8] * size
        assert consistency.is_consistent(consistency.summary(answers), 0.1)
