"""The benchmark of the API server: its arithmetic, and the replay instead of a model."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import host
from benchmarks.host import Load, Measured, Round
from benchmarks.served import ServedError


def test_a_token_is_told_from_its_request() -> None:
    """10 streams: a request costs 2 ms and a token 50 µs, also with one deviating round."""
    load = Load(streams=10, tokens=400, rounds=3)

    def turn(tokens: int, more: float = 0.0) -> Round:
        return Round(10 * (0.002 + tokens * 50e-6) + more, 0.01, 2.0, 10 * tokens, 2_000 * tokens)

    measured = Measured([turn(400), turn(400, 5.0), turn(400)], [turn(100), turn(100), turn(100, 5.0)])
    row = measured.row(load)
    assert (row["cpu_us_per_further_token"], row["cpu_ms_per_request"]) == (50.0, 2.0)
    assert row["cpu_us_per_token"] == 55.0
    assert (row["tokens_per_s_and_core"], row["tokens_per_s"]) == (round(400 / 0.022), 2000)
    assert (row["reads_per_token"], row["bytes_per_token"]) == (1.0, 200)


def test_a_stream_that_ends_early_is_no_measurement() -> None:
    async def run(last: bytes) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n" + last)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            sinks = await host._stream_all(port, host._request(host.CHAT, 5), 3)
        assert [sink.size for sink in sinks] == [len(last) + 29] * 3

    asyncio.run(run(b"data: [DONE]\n\n"))
    with pytest.raises(ServedError, match="ended early"):
        asyncio.run(run(b"data: {}\n\n"))


@pytest.mark.vllm
def test_the_replay_says_its_answer_a_token_a_step_once_the_prompt_is_read() -> None:
    from benchmarks.replay import ReplayExecutor, answer

    executor: Any = object.__new__(ReplayExecutor)
    executor._init_executor()
    words = answer(200)
    assert executor._answer == words
    assert len(words) == 200 + 10, "as many tokens as words, and the control tokens and headers around them"

    def step(new: list[tuple[str, int]], cached: dict[str, int], **scheduled: int) -> dict[str, list[int]]:
        output = executor.execute_model(
            SimpleNamespace(
                finished_req_ids=set(),
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=name, prompt_token_ids=[0] * size, num_computed_tokens=0)
                    for name, size in new
                ],
                scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached), num_computed_tokens=list(cached.values())),
                num_scheduled_tokens=scheduled,
            ),
            non_block=True,
        ).result()
        return {name: output.sampled_token_ids[at] for name, at in output.req_id_to_index.items()}

    assert step([("a", 7)], {}, a=7) == {"a": [words[0]]}
    assert step([("b", 9)], {"a": 7}, a=1, b=5) == {"a": [words[1]], "b": []}
    assert step([], {"a": 8, "b": 5}, a=1, b=4) == {"a": [words[2]], "b": [words[0]]}
