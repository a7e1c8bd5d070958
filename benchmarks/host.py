"""`python -m benchmarks.host`: what the API server's process costs for each streamed token, stock vLLM and the plugin.

Both run as real `vllm serve` processes on `replay.ReplayExecutor`, which returns a prepared answer: the scheduler, the
engine's process and the transport are vLLM's, no model runs and no GPU is needed. The clients are bare sockets. What is
counted is the processor time of the API server's process, so that a busy machine disturbs little, and in turns, so that
it disturbs both alike. Answers of two lengths separate the cost of a token from that of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib.metadata
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from benchmarks import served, shapes
from benchmarks.served import ServedError
from vllm_gptoss.cli.recipes.model_config import model_config

TOKENS = "GPTOSS_BENCH_TOKENS"
"""Variable of the executor: words of the answer, a token each; the control tokens around them come in addition."""
STEP_MS = "GPTOSS_BENCH_STEP_MS"
"""Variable of the executor: how long a step lasts at least, as on a GPU. 0: as fast as the engine's loop goes."""

STOCK, PLUGIN, RUST = "stock", "plugin", "rust"
CHAT, RESPONSES, COMPLETIONS = "chat completions", "responses", "completions"
_PATHS = {CHAT: "/v1/chat/completions", RESPONSES: "/v1/responses", COMPLETIONS: "/v1/completions"}
_ARGUMENTS = (
    "--max-model-len", "4096", "--max-num-seqs", "1024", "--no-enable-prefix-caching",
    "--distributed-executor-backend", "benchmarks.replay.ReplayExecutor",
)  # fmt: skip
_TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "openai", "--reasoning-parser", "openai_gptoss")


@dataclass(frozen=True)
class Load:
    """`streams` requests at once, for answers of `tokens` tokens and of a quarter of them."""

    streams: int
    tokens: int
    rounds: int

    @property
    def few(self) -> int:
        return self.tokens // 4


@dataclass
class Round:
    """One turn: CPU seconds of the API server (`kernel` of them in the kernel); the clients' reads and bytes."""

    cpu: float
    kernel: float
    wall: float
    reads: int
    size: int


@dataclass
class Measured:
    long: list[Round] = field(default_factory=list)
    short: list[Round] = field(default_factory=list)

    def row(self, load: Load) -> dict[str, Any]:
        """Microseconds for each token of a long answer, all in; and what a token more costs, and a request."""
        long, short = (statistics.median(r.cpu for r in rounds) / load.streams for rounds in (self.long, self.short))
        marginal = (long - short) / (load.tokens - load.few)
        total = load.streams * load.tokens

        def median(name: str) -> float:
            return float(statistics.median(getattr(r, name) for r in self.long)) / total

        return {
            "cpu_us_per_token": round(long / load.tokens * 1e6, 1),
            "of_which_kernel_us": round(median("kernel") * 1e6, 1),
            "cpu_us_per_further_token": round(marginal * 1e6, 1),
            "cpu_ms_per_request": round((long - marginal * load.tokens) * 1e3, 2),
            "tokens_per_s_and_core": round(load.tokens / long),
            "tokens_per_s": round(1 / median("wall")),
            "reads_per_token": round(median("reads"), 2),
            "bytes_per_token": round(median("size")),
            "rounds_us_per_token": [round(r.cpu / total * 1e6, 1) for r in self.long],
        }


def main(
    streams: Annotated[int, typer.Option(help="Requests at once.")] = 256,
    tokens: Annotated[int, typer.Option(help="Tokens of a long answer; a short one has a quarter.")] = 400,
    rounds: Annotated[int, typer.Option(help="Turns of each server, endpoint and length.")] = 5,
    step_ms: Annotated[float, typer.Option(help="How long an engine step lasts at least; 0: as it goes.")] = 20.0,
    servers: Annotated[int, typer.Option(help="API server processes (--api-server-count).")] = 1,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with gpt-oss's tokenizer.json.")] = None,
    rust: Annotated[Path | None, typer.Option(help="vLLM's vllm-rs: measure stock vLLM with it as well.")] = None,
    out: Annotated[Path | None, typer.Option(help="Results, as JSON.")] = None,
) -> None:
    """CPU time of the API server for each streamed token, stock and plugin, without a GPU."""
    load = Load(streams, tokens, rounds)
    record: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "cpu": _cpu_name()},
        "vllm": importlib.metadata.version("vllm"),
        "date": datetime.date.today().isoformat(),
        "load": {"streams": streams, "tokens": tokens, "rounds": rounds, "step_ms": step_ms, "api_servers": servers},
        "gpu": "not measured: no GPU in this run",
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(model_config(shapes.TINY)))
        served.write_tokenizer(model, tokenizer)
        running = {
            variant: stack.enter_context(_server(variant, model, tokens, step_ms, servers, rust))
            for variant in (STOCK, PLUGIN, *([RUST] if rust else []))
        }
        record["rows"] = measure(running, load)
    text = json.dumps(record, indent=2)
    typer.echo(text)
    if out:
        out.write_text(text + "\n")


def measure(running: dict[str, tuple[psutil.Process, int]], load: Load) -> list[dict[str, Any]]:
    """Rows of every server (its process and port) and endpoint, measured in turns."""
    has_all = {variant for variant in running if variant != RUST}  # vllm-rs answers /v1/responses with 404
    cases = [(each, path) for path in _PATHS for each in running if path != RESPONSES or each in has_all]
    found = {case: Measured() for case in cases}
    for variant, endpoint in cases:  # warm up
        _round(running[variant], endpoint, load.streams, load.few)
    for _ in range(load.rounds):
        for variant, endpoint in cases:
            found[variant, endpoint].long.append(_round(running[variant], endpoint, load.streams, load.tokens))
            found[variant, endpoint].short.append(_round(running[variant], endpoint, load.streams, load.few))
    return [{"variant": case[0], "endpoint": case[1], **found[case].row(load)} for case in cases]


def _round(server: tuple[psutil.Process, int], endpoint: str, streams: int, tokens: int) -> Round:
    process, port = server
    before, began = _cpu(process), time.perf_counter()
    sinks = asyncio.run(_stream_all(port, _request(endpoint, tokens), streams))
    wall, after = time.perf_counter() - began, _cpu(process)
    return Round(
        sum(after) - sum(before), after[1] - before[1], wall, sum(s.reads for s in sinks), sum(s.size for s in sinks)
    )


def _cpu(process: psutil.Process) -> tuple[float, float]:
    """(user, kernel) seconds of the API server, or of all of them: the engine's process is none."""
    servers = [process] if (children := _api_servers(process)) == [] else children
    times = [one.cpu_times() for one in servers]
    return sum(t.user for t in times), sum(t.system for t in times)


def _api_servers(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children() if re.search("APIServer|vllm-rs", " ".join(child.cmdline()))]


def _request(endpoint: str, tokens: int) -> bytes:
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens},
        RESPONSES: {"input": "hi", "max_output_tokens": tokens, "store": False},
        COMPLETIONS: {"prompt": "hi", "max_tokens": tokens},
    }
    data = json.dumps({"model": served.NAME, "stream": True, **bodies[endpoint]}).encode()
    head = f"POST {_PATHS[endpoint]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class _Sink(asyncio.Protocol):
    """Sends a request and counts what comes back."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.reads = self.size = 0
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        self.size += len(data)
        self._tail = (self._tail + data)[-512:]

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set_result(self._tail)


async def _stream_all(port: int, request: bytes, streams: int) -> list[_Sink]:
    async def one() -> _Sink:
        loop = asyncio.get_running_loop()
        _, sink = await loop.create_connection(lambda: _Sink(request), "127.0.0.1", port)
        end = await sink.done
        if b"[DONE]" not in end and b"response.completed" not in end and b"response.incomplete" not in end:
            raise ServedError(f"a stream ended early: {end!r}")
        return sink

    return await asyncio.gather(*(one() for _ in range(streams)))


@contextlib.contextmanager
def _server(
    variant: str, model: Path, tokens: int, step_ms: float, servers: int, rust: Path | None
) -> Iterator[tuple[psutil.Process, int]]:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "gptoss" if variant == PLUGIN else "none",
        "GPTOSS_STORE": "off",
        "PYTHONPATH": str(served.CHECKOUT),
        TOKENS: str(tokens),
        STEP_MS: str(step_ms),
    }
    if rust and variant == RUST:
        environment |= {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": _with_parsers(rust, model)}
    arguments = [str(model), "--served-model-name", served.NAME, *_ARGUMENTS, "--api-server-count", str(servers)]
    arguments += _TOOLS if variant == STOCK else ()
    with served.server(arguments, environment, model / f"{variant}.log") as (process, port):
        yield psutil.Process(process.pid), port


def _with_parsers(rust: Path, folder: Path) -> str:
    """A script that starts `rust` with the parsers `auto`: vllm 0.32 passes no parser, and chat then answers 500."""
    script = folder / "rust.py"
    script.write_text(f"""#!{sys.executable}
import json, os, sys
at = sys.argv.index("--args-json") + 1
parsers = dict.fromkeys(("tool_call_parser", "reasoning_parser"), "auto")
sys.argv[at] = json.dumps(json.loads(sys.argv[at]) | parsers)
os.execv({str(rust.resolve())!r}, ["vllm-rs", *sys.argv[1:]])
""")
    script.chmod(0o755)
    return str(script)


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown"


if __name__ == "__main__":
    typer.run(main)
