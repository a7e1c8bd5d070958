"""The load that `benchmarks.long_prompts` sends, and what it counts, at an imitation of a server."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
import typer
from aiohttp import web

from benchmarks import long_prompts
from benchmarks.long_prompts import ANSWER, NEW, OWN, SHARED, TURNS, Load, measure, percentile

LONGEST = SHARED + OWN + (TURNS - 1) * (ANSWER + NEW)


def row_and_prompts(load: Load, most: int = LONGEST) -> tuple[dict[str, Any], list[list[int]]]:
    """Of a server that answers with other ids, and refuses prompts of more than `most` tokens."""
    prompts: list[list[int]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompts.append(body["prompt"])
        if len(body["prompt"]) > most:
            return web.json_response({"error": "too long"}, status=400)
        await asyncio.sleep(0.05)  # a row has seconds to two places
        stream = web.StreamResponse()
        await stream.prepare(request)
        for token in range(body["max_tokens"]):
            chunk = {"choices": [{"token_ids": [len(prompts) * 1000 + token]}]}
            await stream.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def run() -> dict[str, Any]:
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await measure(runner.addresses[0][1], load, 30)
        finally:
            await runner.cleanup()

    return asyncio.run(run()), prompts


def test_every_prompt_is_sent_once_and_every_token_counted() -> None:
    row, prompts = row_and_prompts(Load.of("256/8:3:7"))
    assert sorted(map(len, prompts)) == [256] * 7
    assert len({tuple(prompt) for prompt in prompts}) == 7, "no prompt is found in the prefix cache"
    assert (row["requests"], row["failed"], row["streams"]) == (7, 0, 3)
    assert row["output_tok_s"] == pytest.approx(7 * 8 / row["seconds"], rel=0.2)


def test_an_agent_sends_back_what_it_was_answered() -> None:
    row, prompts = row_and_prompts(Load.of("agents:1"))
    assert [len(prompt) for prompt in prompts] == [SHARED + OWN + turn * (ANSWER + NEW) for turn in range(TURNS)]
    for turn, (earlier, later) in enumerate(itertools.pairwise(prompts), 1):
        assert later[: len(earlier)] == earlier
        assert later[len(earlier) :][:ANSWER] == [turn * 1000 + token for token in range(ANSWER)]
    assert row["requests"] == TURNS


def test_agents_share_their_first_tokens_only() -> None:
    _, prompts = row_and_prompts(Load.of("agents:2"))
    first, second = (prompt for prompt in prompts if len(prompt) == SHARED + OWN)
    assert first[:SHARED] == second[:SHARED]
    assert first[SHARED:] != second[SHARED:]


@pytest.mark.parametrize(("most", "failed"), [(255, 2), (256, 0)])
def test_a_refused_request_is_shown_and_counts_no_token(most: int, failed: int) -> None:
    row, _ = row_and_prompts(Load.of("256/8:1:2"), most)
    assert (row["failed"], row["requests"]) == (failed, 2 - failed)
    assert (row["output_tok_s"] == 0) is (failed == 2)
    assert row.get("errors") == (['{"error": "too long"}'] * 2 if failed else None)


@pytest.mark.parametrize("text", ["8k/1k", "8k/1k:4", "8k/1k:4:0", "agents", "agents:0", "agents:4:4", "8k/1k:4:-1"])
def test_what_is_no_load_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        Load.of(text)


def test_percentiles_are_those_of_the_values() -> None:
    assert percentile([0.001 * ms for ms in range(101)], 50) == 50.0
    assert percentile([0.001 * ms for ms in range(101)], 99) == 99.0
    assert percentile([1.0], 50) is None
    assert long_prompts.Load.of("32k/1k:24:36") == Load("32k/1k", 24, 36, 32_768, 1024)
