"""`vllm serve` under long prompts, and under agents that share a prefix: the plugin and stock, one after another.

    python -m benchmarks.long_prompts --model 20b --load 8k/1k:128:192 --load 32k/1k:32:48 --load agents:48 \
        --out FILE -- --kv-cache-memory-bytes 30064771072

`8k/1k:128:192`: 192 prompts of 8,192 random token ids and 1,024 greedy tokens each, by 128 streams; a stream sends its
next request when one has ended. `agents:48`: 48 streams of four turns; the prompt is a prefix of 4,096 tokens that all
share, 2,048 of the stream, then in turn the answer (256 tokens) and 1,024 new tokens. Dummy weights. Further arguments
are those of `vllm serve`. `--together` loads both servers before the first is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib.metadata
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer

from benchmarks import served, shapes
from benchmarks.decode.__main__ import lengths
from vllm_gptoss.cli.bench.start import STOCK
from vllm_gptoss.cli.bench.worker import PLUGIN, environment
from vllm_gptoss.cli.recipes.model_config import model_config

AGENTS = "agents"
TURNS, SHARED, OWN, NEW, ANSWER = 4, 4096, 2048, 1024, 256
"""Of an agent: turns, tokens of the shared prefix, of its first prompt, of the others, and of an answer."""
TOKENS = 190_000
"""Token ids below it are drawn: those above are special."""


@dataclass(frozen=True)
class Load:
    """What one row measures. prompt, output: tokens, 0 for agents."""

    name: str
    streams: int
    requests: int
    prompt: int = 0
    output: int = 0

    @classmethod
    def of(cls, text: str) -> Load:
        """Of `8k/1k:STREAMS:REQUESTS` or `agents:STREAMS`.

        Raises:
            typer.BadParameter: it is neither.
        """
        name, _, rest = text.partition(":")
        numbers = rest.split(":")
        if not all(number.isdecimal() and int(number) for number in numbers) or len(numbers) != 2 - (name == AGENTS):
            raise typer.BadParameter(f"{text!r} is neither 8k/1k:STREAMS:REQUESTS nor {AGENTS}:STREAMS")
        if name == AGENTS:
            return cls(name, int(rest), int(rest) * TURNS)
        [(prompt, output)] = lengths(name)
        return cls(name, int(numbers[0]), int(numbers[1]), prompt, output)


@dataclass
class Client:
    """Streams of /v1/completions at a server, and when their tokens came, in seconds."""

    url: str
    session: aiohttp.ClientSession
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    failed: list[str] = field(default_factory=list)

    async def complete(self, prompt: list[int], output: int) -> list[int]:
        """The token ids of an answer; fewer than `output` where the request failed."""
        body = {
            "model": served.NAME, "prompt": prompt, "max_tokens": output, "ignore_eos": True, "temperature": 0,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        found: list[int] = []
        before = time.perf_counter()
        try:
            async with self.session.post(self.url, json=body) as answer:
                if answer.status != 200:
                    self.failed.append((await answer.text())[:300])
                async for line in answer.content:
                    if answer.status == 200 and line.startswith(b"data: {"):
                        now = time.perf_counter()
                        (self.gaps if found else self.first).append(now - before)
                        before = now
                        found += json.loads(line[6:])["choices"][0].get("token_ids") or []
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failed.append(repr(error))
        self.tokens += len(found)
        return found


def drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, TOKENS) for _ in range(count)]


def _agents(client: Client, load: Load, rng: random.Random) -> list[Coroutine[Any, Any, None]]:
    shared = drawn(rng, SHARED)

    async def talk(turns: list[list[int]]) -> None:
        history = list(shared)
        for new in turns:
            history += new
            history += await client.complete(history, ANSWER)

    all_turns = [[drawn(rng, OWN if turn == 0 else NEW) for turn in range(TURNS)] for _ in range(load.streams)]
    return [talk(turns) for turns in all_turns]


def _prompts(client: Client, load: Load, rng: random.Random) -> list[Coroutine[Any, Any, None]]:
    left = [drawn(rng, load.prompt) for _ in range(load.requests)]

    async def stream() -> None:
        while left:
            await client.complete(left.pop(), load.output)

    return [stream() for _ in range(load.streams)]


async def measure(port: int, load: Load, limit: float) -> dict[str, Any]:
    """A row of the server at `port`. limit: seconds of a request."""
    timeout, rng = aiohttp.ClientTimeout(total=limit), random.Random(str(load))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=2**20) as session:
        client = Client(f"http://127.0.0.1:{port}/v1/completions", session)
        streams = (_agents if load.name == AGENTS else _prompts)(client, load, rng)  # draws every prompt
        began = time.perf_counter()
        await asyncio.gather(*streams)
        seconds = time.perf_counter() - began
    row = {
        "load": load.name, "streams": load.streams, "requests": len(client.first), "failed": len(client.failed),
        "seconds": round(seconds, 2), "output_tok_s": round(client.tokens / seconds, 1),
    }  # fmt: skip
    for name, values in (("ttft", client.first), ("itl", client.gaps)):
        row |= {f"{name}_ms_p50": percentile(values, 50), f"{name}_ms_p99": percentile(values, 99)}
    return row | ({"errors": client.failed[:3]} if client.failed else {})


def percentile(seconds: Sequence[float], of_100: int) -> float | None:
    """In ms; None for fewer than two values."""
    if len(seconds) < 2:
        return None
    return round(statistics.quantiles(seconds, n=100, method="inclusive")[of_100 - 1] * 1e3, 3)


@contextlib.contextmanager
def _server(model: Path, variant: str, arguments: Sequence[str]) -> Iterator[tuple[int, float]]:
    """A server's port, and the seconds of its start."""
    environ = environment(variant) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    words = [str(model), "--served-model-name", served.NAME, "--load-format", "dummy", "--disable-uvicorn-access-log"]
    began = time.monotonic()
    with served.server([*words, *arguments], environ, model / f"{variant}.log") as (_, port):
        yield port, time.monotonic() - began


def main(
    arguments: Annotated[list[str] | None, typer.Argument(help="further arguments of vllm serve, after --")] = None,
    model: Annotated[str, typer.Option(help="a shape: 20b, 120b or tiny")] = "20b",
    load: Annotated[list[str] | None, typer.Option(help="8k/1k:STREAMS:REQUESTS or agents:STREAMS")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="plugin, stock")] = None,
    together: Annotated[bool, typer.Option(help="load all servers before the first is measured")] = False,
    tokenizer: Annotated[Path | None, typer.Option(help="folder with gpt-oss's tokenizer.json")] = None,
    limit: Annotated[float, typer.Option(help="seconds of a request")] = 300,
    out: Annotated[Path | None, typer.Option(help="JSON file for the result")] = None,
) -> None:
    """Output tokens per second, and the times to the first and between tokens, of vllm serve."""
    loads = [Load.of(text) for text in load or ["8k/1k:128:192"]]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(model_config(shapes.shape(model))))
        served.write_tokenizer(path, tokenizer)
        servers: dict[str, contextlib.AbstractContextManager[tuple[int, float]]]
        servers = {each: _server(path, each, arguments or []) for each in variant or (PLUGIN, STOCK)}
        if together:
            with ThreadPoolExecutor() as pool:
                ready = pool.map(stack.enter_context, servers.values())
                servers = {each: contextlib.nullcontext(one) for each, one in zip(servers, ready, strict=True)}
        for each, server in servers.items():
            with server as (port, start_s):
                for row in _rows(port, loads, limit):
                    rows.append({"model": model, "variant": each, "start_s": round(start_s), **row})
                    typer.echo(rows[-1])
                    if out:
                        out.write_text(json.dumps(_record(arguments or [], rows), indent=1) + "\n")


def _rows(port: int, loads: Sequence[Load], limit: float) -> Iterator[dict[str, Any]]:
    asyncio.run(measure(port, Load(AGENTS, 2, 2 * TURNS), limit))  # warm-up
    for load in loads:
        yield asyncio.run(measure(port, load, limit))


def _record(arguments: list[str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    from vllm_gptoss.engine.choose import device

    return {
        "command": f"python -m benchmarks.long_prompts, vllm serve {' '.join(arguments)}",
        "gpu": device.detect().name,
        "cores": os.cpu_count(),
        "versions": {name: importlib.metadata.version(name) for name in ("vllm", "torch", "vllm-gptoss")},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": rows,
    }


if __name__ == "__main__":
    typer.run(main)
