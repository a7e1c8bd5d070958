"""What serving a streamed answer costs: this plugin's handler against vLLM's own, on the same replayed tokens.

Both run in vLLM's own API server app on a stand-in for the engine client that yields recorded tokens, one a step, so
that nothing but the handler differs. For each: CPU time of the server process per token, and wall time, at 64
concurrent streams. Run: `python -m benchmarks.responses [--streams 64] [--tokens 400] [--rounds 5] [--rate 0]`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import uvloop

HANDLERS = ("vllm", "gptoss")


class ReplayClient:
    """An engine client that generates a reasoning message and an answer of `tokens` tokens."""

    errored = False
    dead_error = None

    def __init__(self, vllm_config: Any, tokens: int, rate: float) -> None:
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        from vllm_gptoss.harmony.tokens import encoding

        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        words = " word" * (tokens // 2)
        text = f"<|channel|>analysis<|message|>{words}<|end|>"
        text += f"<|start|>assistant<|channel|>final<|message|>{words}<|return|>"
        self._tokens = encoding().encode(text, allowed_special="all")
        self._rate = rate

    def check_admission(self, *args: Any, **kwargs: Any) -> None:
        return None

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        from vllm.outputs import CompletionOutput, RequestOutput

        prompt_ids = prompt["prompt_token_ids"]
        began, last = time.monotonic(), len(self._tokens) - 1
        for index, token in enumerate(self._tokens):
            if self._rate:
                await asyncio.sleep(max(0.0, began + index / self._rate - time.monotonic()))
            else:
                await asyncio.sleep(0)
            reason = "stop" if index == last else None
            completion = CompletionOutput(0, "", [token], None, None, finish_reason=reason)
            yield RequestOutput(request_id, None, prompt_ids, None, [completion], index == last, num_cached_tokens=0)


async def serve(handler: str, model: str, port: int, tokens: int, rate: float) -> None:
    import uvicorn
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:  # vLLM 0.32
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    os.environ["VLLM_PLUGINS"] = "gptoss" if handler == "gptoss" else ""
    os.environ["GPTOSS_ENDPOINT"] = "1" if handler == "gptoss" else "0"
    os.environ["GPTOSS_RESPONSES_STORE"] = "off"  # vLLM's own stores nothing by default
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model, "--served-model-name", "m"])
    client = ReplayClient(AsyncEngineArgs.from_cli_args(args).create_engine_config(), tokens, rate)
    app = build_app(args, ("generate",))
    await init_app_state(client, app.state, args, ("generate",))
    await uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", access_log=False)).serve()


async def stream(port: int) -> tuple[int, float]:
    """Bytes read and seconds to the first event, over a bare socket: the client must not be what is measured."""
    body = json.dumps({"model": "m", "input": "hi", "stream": True, "store": False}).encode()
    head = (
        f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.perf_counter()
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    data = await reader.read(65536)
    first, size, tail = time.perf_counter() - began, len(data), data
    assert data.startswith(b"HTTP/1.1 200"), data
    while data := await reader.read(1 << 20):
        size += len(data)
        tail = (tail + data)[-8192:]
    assert b"response.completed" in tail, tail[-500:]
    writer.close()
    return size, first


async def measure(process: psutil.Process, port: int, streams: int) -> dict[str, float]:
    before, began = sum(process.cpu_times()[:2]), time.perf_counter()
    results = await asyncio.gather(*(stream(port) for _ in range(streams)))
    wall = time.perf_counter() - began
    return {
        "cpu": sum(process.cpu_times()[:2]) - before,
        "wall": wall,
        "bytes": float(sum(size for size, _ in results)),
        "first": statistics.median(first for _, first in results),
    }


@contextlib.contextmanager
def server(handler: str, options: argparse.Namespace) -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.responses", "--serve", handler, "--port", str(port)]
    command += ["--model", options.model, "--tokens", str(options.tokens), "--rate", str(options.rate)]
    process = subprocess.Popen(command)
    try:
        for _ in range(1200):
            assert process.poll() is None, "the server ended"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield psutil.Process(process.pid), port
    finally:
        process.terminate()
        process.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default=".cache/small-model", help="a gpt-oss model folder; its weights are not read"
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.0, help="tokens per second and stream; 0 for no waiting")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", choices=HANDLERS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve, options.model, options.port, options.tokens, options.rate))
        return
    results: dict[str, list[dict[str, float]]] = {name: [] for name in HANDLERS}
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(server(name, options)) for name in HANDLERS}
        for process, port in running.values():
            asyncio.run(measure(process, port, options.streams))  # warm up
        for _ in range(options.rounds):  # in turns, so that the machine's moods hit both
            for name, (process, port) in running.items():
                results[name].append(asyncio.run(measure(process, port, options.streams)))
    report(results, options)


def report(results: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> None:
    total = options.streams * options.tokens
    summary: dict[str, Any] = {"streams": options.streams, "tokens": options.tokens, "rate": options.rate}
    for name, rounds in results.items():
        middle = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        summary[name] = {
            "cpu_us_per_token": round(middle["cpu"] / total * 1e6, 2),
            "wall_s": round(middle["wall"], 3),
            "first_event_s": round(middle["first"], 4),
            "bytes_per_token": round(middle["bytes"] / total),
            "rounds_cpu_s": [round(r["cpu"], 3) for r in rounds],
        }
    ours, theirs = summary["gptoss"]["cpu_us_per_token"], summary["vllm"]["cpu_us_per_token"]
    summary["overhead_percent"] = round((ours / theirs - 1) * 100, 1)
    print(json.dumps(summary, indent=2))
    if options.output:
        options.output.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
