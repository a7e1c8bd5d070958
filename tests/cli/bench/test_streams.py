"""The benchmark of a running server: its arithmetic, streams that go wrong, and a real server's engine."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from demo.server import Server
from vllm_gptoss.cli import main
from vllm_gptoss.cli.bench import engine_process, streams
from vllm_gptoss.cli.bench.streams import Load, ServedError, Stream

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def event(text: str = "word") -> bytes:
    data = b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def ask(answer: Answer, tokens: int = 3) -> Stream:
    """What a client reads of a server that answers so."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer)
        writer.close()

    async def run() -> Stream:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await streams.stream(port, streams.request("m", Load(1, 5, tokens)), tokens)

    return asyncio.run(run())


def test_only_the_time_when_all_decode_counts() -> None:
    """Two streams, one token each 2 ms; the second begins 20 ms later, and the first ends 20 ms earlier."""
    first = Stream(0.0, [(0.010 + at * 0.002, 1) for at in range(41)])
    second = Stream(0.0, [(0.030 + at * 0.002, 1) for at in range(41)])
    row = streams.row(Load(2, 100, 41), [first, second])
    assert row["ms_a_token"] == 2.0
    assert (row["p50"], row["p99"]) == (2.0, 2.0)
    assert row["ttft_ms"] == 20.0
    assert row["tokens_per_s"] == round(82 / 0.110)
    assert row["events_a_token"] == 1.0


def test_tokens_that_come_together_are_all_counted() -> None:
    """Every fourth event holds four tokens' text: 40 tokens in 10 events, one each 8 ms."""
    row = streams.row(Load(1, 100, 40), [Stream(0.0, [(0.010 + at * 0.008, 1) for at in range(10)])])
    assert row["events_a_token"] == 0.25
    assert row["ms_a_token"] == 2.0


def test_streams_that_never_decode_together_say_so() -> None:
    early, late = Stream(0.0, [(0.01, 1), (0.02, 1)]), Stream(0.0, [(0.03, 1), (0.04, 1)])
    assert streams.row(Load(2, 100, 2), [early, late])["ms_a_token"] is None


def test_an_event_that_two_reads_share_is_counted_once() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        whole = HEAD + event() + event()
        for at in range(0, len(whole), 7):
            writer.write(whole[at : at + 7])
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(event() + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    found = ask(answer)
    assert sum(events for _, events in found.reads) == 3
    assert all(a <= b for (a, _), (b, _) in zip(found.reads, found.reads[1:], strict=False))


def test_a_refusal_is_an_error_that_holds_what_was_said() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": {"message": "max_tokens is too large"}}')

    with pytest.raises(ServedError, match="max_tokens is too large"):
        ask(answer)


@pytest.mark.parametrize("said", [HEAD, HEAD + event(), b""], ids=["no event", "no end", "nothing"])
def test_a_stream_that_ends_early_is_no_measurement(said: bytes) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(said)

    with pytest.raises(ServedError, match="ended early|refused"):
        ask(answer)


def test_nobody_listening_is_one_line(unused_tcp_port: int) -> None:
    done = CliRunner().invoke(main.app, ["bench", "streams", "--port", str(unused_tcp_port)])
    assert done.exit_code == 1
    assert "not measured" in done.output
    assert "Traceback" not in done.output


def test_neighbours_need_the_engine(unused_tcp_port: int) -> None:
    done = CliRunner().invoke(main.app, ["bench", "streams", "--port", str(unused_tcp_port), "--busy", "2"])
    assert done.exit_code == 2
    assert "on this machine" in done.output


def test_a_real_server_is_measured_with_its_engine(served: Server, tmp_path: Path) -> None:
    port, out = served.url.rpartition(":")[2], tmp_path / "streams.json"
    size = ["--port", port, "--streams", "1,3", "--prompt", "20", "--tokens", "60", "--out", str(out)]
    assert (done := CliRunner().invoke(main.app, ["bench", "streams", *size])).exit_code == 0, done.output
    assert (done := CliRunner().invoke(main.app, ["bench", "streams", *size, "--busy", "1"])).exit_code == 0, (
        done.output
    )
    rows = json.loads(out.read_text())["rows"]
    assert [(row["streams"], row["busy"]) for row in rows] == [(1, 0), (3, 0), (1, 1), (3, 1)]
    assert all(row["ttft_ms"] > 0 and row["tokens_per_s"] > 0 and row["events_a_token"] > 0 for row in rows)
    assert all(row["engine_thread_ms"] > 0 for row in rows), "the engine runs the small model itself"
    engine = engine_process.find(int(port))
    assert engine is not None
    assert served.process.pid in {parent.pid for parent in engine.parents()}


def test_all_streams_of_a_load_are_asked_for_at_once() -> None:
    """All clients send at once: this server answers only after all five requests."""
    loop, asked = asyncio.new_event_loop(), []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.append(writer)
        if len(asked) == 5:
            for each in asked:
                each.write(HEAD + event())
            await asyncio.sleep(2)  # longer than a busy machine keeps a client from reading
            for each in asked:
                each.write(event() + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
                each.close()

    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    load = Load(5, 5, 2)
    found = streams.run(server.sockets[0].getsockname()[1], "m", load)
    assert [[events for _, events in each.reads] for each in found] == [[1, 1]] * 5
    assert streams.row(load, found)["ms_a_token"] > 500, "they decoded together for two seconds"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def test_neighbours_go_and_cores_come_back() -> None:
    this = psutil.Process()
    before, others = os.sched_getaffinity(0), this.children()
    with engine_process.crowded(this, 2) as core:
        assert os.sched_getaffinity(0) == {core}
        neighbours = [each for each in this.children() if each not in others]
        assert len(neighbours) == 2
        assert engine_process.processor_time(this) is not None
    assert os.sched_getaffinity(0) == before
    assert not any(each.is_running() for each in neighbours)
