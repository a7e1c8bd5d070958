"""`vllm-gptoss bench streams`: what clients of a running `vllm serve` get, and what its engine's threads take for it.

Any server of gpt-oss on this machine, stock or plugin: run it for both, and compare. All streams of a size begin
together, on bare sockets, with random prompts, and are measured while all of them decode. With `--busy` the engine
shares one core with processes that never rest, which is what a slow host is.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib.metadata
import json
import multiprocessing
import random
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from vllm_gptoss.cli.bench import engine_process

CLIENTS = 4
"""Reading processes, enough not to be the bottleneck: one reads some 30,000 events a second."""
WORDS = 190_000
"""Token ids below are words of gpt-oss's vocabulary; control tokens lie above."""
STARTS_S = 120
"""How long a client may take to start on a busy machine."""
WARM_UP = 30
"""Tokens of a stream that is not measured: kernels are compiled and graphs captured at first use."""
EVENT = b'"text":'
"""Once in each event of a completion."""


class ServedError(RuntimeError):
    """The server or the client ended; the message holds the end of its output."""


@dataclass(frozen=True)
class Load:
    """`streams` completions at once, of `prompt` tokens each, `tokens` tokens long."""

    streams: int
    prompt: int
    tokens: int


@dataclass
class Stream:
    """One client's stream. began: time of its request; reads: (time, events). Seconds of the machine's clock."""

    began: float
    reads: list[tuple[float, int]] = field(default_factory=list)


def main(
    port: Annotated[int, typer.Option(help="Where the server listens, on this machine.")] = 8000,
    streams: Annotated[str, typer.Option(help="How many at once, one size after the other.")] = "1,8,64,256",
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 400,
    repeats: Annotated[int, typer.Option(help="Measurements of each size.")] = 1,
    busy: Annotated[int, typer.Option(help="Processes that never rest, on one core with the engine.")] = 0,
    label: Annotated[str, typer.Option(help="What the server is, for the record.")] = "",
    out: Annotated[Path | None, typer.Option(help="Results, as JSON; rows are added to those in it.")] = None,
) -> None:
    """Time between tokens of a running server's streams, and its engine's processor time, on this machine."""
    engine = engine_process.find(port)
    if engine is None:
        typer.echo(f"no engine of this user behind port {port}: its processor time is not measured", err=True)
        if busy:
            raise typer.BadParameter("--busy needs the engine's process on this machine")
    record = _record(out)
    try:
        model = name_of_model(port)
        with engine_process.crowded(engine, busy) if busy and engine else contextlib.nullcontext():
            for size in streams.split(","):
                load = Load(int(size), prompt, tokens)
                for row in measure(port, model, load, repeats, engine):
                    row = {"label": label, "busy": busy, **row}
                    record["rows"].append(row)
                    typer.echo(json.dumps(row))
                    if out:
                        out.write_text(json.dumps(record, indent=1) + "\n")
    except (ServedError, OSError) as error:
        typer.echo(f"not measured: {error}", err=True)
        raise typer.Exit(1) from None


def _record(out: Path | None) -> dict[str, Any]:
    if out and out.exists():
        return dict(json.loads(out.read_text()))
    versions = {name: importlib.metadata.version(name) for name in ("vllm", "vllm-gptoss")}
    return {"date": datetime.date.today().isoformat(), "cores": psutil.cpu_count(), "versions": versions, "rows": []}


def name_of_model(port: int) -> str:
    """The first model of the server on `port`. Raises: OSError: no server answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def measure(port: int, model: str, load: Load, repeats: int, engine: psutil.Process | None) -> Iterator[dict[str, Any]]:
    """A row for each repeat, after a load that warms up.

    Raises:
        ServedError: a stream ended early, or was refused.
    """
    run(port, model, Load(load.streams, load.prompt, min(WARM_UP, load.tokens)))
    for _ in range(repeats):
        before = engine and engine_process.processor_time(engine)
        found = run(port, model, load)
        after = engine and engine_process.processor_time(engine)
        yield row(load, found) | engine_row(load, before, after)


def engine_row(
    load: Load, before: tuple[float, float] | None, after: tuple[float, float] | None
) -> dict[str, float | None]:
    """Processor time of the engine's loop and of its process's other threads, ms a step, prompts included."""
    if before is None or after is None:
        return {"engine_thread_ms": None, "other_threads_ms": None}
    spent = [round((b - a) / load.tokens * 1e3, 3) for a, b in zip(before, after, strict=True)]
    return dict(zip(("engine_thread_ms", "other_threads_ms"), spent, strict=True))


def row(load: Load, found: Sequence[Stream]) -> dict[str, Any]:
    """ms between two tokens of a stream while all decode, percentiles of the time between two reads, and the rest.

    Tokens that arrive together are one event, so that an event counts as the stream's share of tokens.
    """
    begins = max(stream.reads[0][0] for stream in found)
    ends = min(stream.reads[-1][0] for stream in found)
    inside, gaps = 0.0, []
    for stream in found:
        share = load.tokens / sum(events for _, events in stream.reads)
        inside += share * sum(events for at, events in stream.reads if begins < at <= ends)
        gaps += [b - a for (a, _), (b, _) in pairwise(stream.reads) if a >= begins and b <= ends]
    seconds = max(stream.reads[-1][0] for stream in found) - min(stream.began for stream in found)
    events = sum(events for stream in found for _, events in stream.reads)
    return {
        "streams": load.streams,
        "prompt": load.prompt,
        "tokens": load.tokens,
        "ms_a_token": round((ends - begins) * load.streams / inside * 1e3, 3) if inside else None,
        **{name: round(value * 1e3, 2) for name, value in _percentiles(gaps).items()},
        "ttft_ms": round(statistics.median(stream.reads[0][0] - stream.began for stream in found) * 1e3, 1),
        "tokens_per_s": round(load.streams * load.tokens / seconds),
        "events_a_token": round(events / (load.streams * load.tokens), 3),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}


def run(port: int, model: str, load: Load) -> list[Stream]:
    """All streams of a load, by several processes."""
    clients = min(CLIENTS, load.streams)
    shares = [load.streams // clients + (at < load.streams % clients) for at in range(clients)]
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(clients)
    with ProcessPoolExecutor(clients, context, _meet, (together,)) as pool:
        done = [
            pool.submit(_client, port, [request(model, load) for _ in range(share)], load.tokens) for share in shares
        ]
        return [stream for each in done for stream in each.result()]


_client_meets: dict[str, Any] = {}
"""Of a client's process: the barrier at which all begin."""


def _meet(together: Any) -> None:
    _client_meets["all"] = together


def request(model: str, load: Load) -> bytes:
    """A completion of random words, greedy, which ends when it is as long as it is to be."""
    body = {
        "model": model,
        "prompt": [random.randrange(WORDS) for _ in range(load.prompt)],  # noqa: S311
        "max_tokens": load.tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    return post("/v1/completions", body)


def _client(port: int, requests: Sequence[bytes], tokens: int) -> list[Stream]:
    """A share of the streams, once all clients have started: none takes two shares, one after the other."""
    _client_meets["all"].wait(STARTS_S)

    async def all_of_them() -> list[Stream]:
        return await asyncio.gather(*(stream(port, each, tokens) for each in requests))

    return asyncio.run(all_of_them())


async def stream(port: int, request: bytes, tokens: int) -> Stream:
    """Sends the request, and reads to the end. Raises: ServedError: the server refused, or ended the stream before its
    last event. OSError: no server listens.
    """
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_connection(lambda: _Reader(request, loop.create_future), "127.0.0.1", port)
    try:
        await reader.done
    finally:
        transport.close()
    if not reader.head.startswith(b"HTTP/1.1 200"):
        raise ServedError(f"the server refused a stream: {reader.head[:2000].decode(errors='replace')}")
    if b"[DONE]" not in reader.tail or not reader.stream.reads:
        raise ServedError(f"a stream of {tokens} tokens ended early: {reader.tail.decode(errors='replace')}")
    return reader.stream


class _Reader(asyncio.Protocol):
    """Sends a request; notes when something came, and how many events began in it."""

    def __init__(self, request: bytes, future: Callable[[], asyncio.Future[None]]) -> None:
        self._request = request
        self.stream = Stream(0.0)
        self.head = self.tail = b""
        self.done = future()

    def connection_made(self, transport: Any) -> None:
        self.stream.began = time.monotonic()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if len(self.head) < 2000:
            self.head += data[:2000]
        # A read may end within the mark that is counted; the stored tail is too short to hold a whole one.
        text = self.tail[1 - len(EVENT) :] + data
        if events := text.count(EVENT):
            self.stream.reads.append((now, events))
        self.tail = (self.tail + data)[-200:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def post(path: str, body: dict[str, Any]) -> bytes:
    """An HTTP request that closes its connection, for clients on bare sockets."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
