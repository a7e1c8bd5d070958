"""`vllm-gptoss bench start`: the phases of a start of `vllm serve`, with the plugin and without.

    vllm-gptoss bench start openai/gpt-oss-20b --variant plugin --variant stock --repeats 2
    vllm-gptoss bench start DIR -- --load-format dummy --max-model-len 8192      # further arguments of vllm serve

A phase ends with a line of vLLM's log, at the time when that line arrives. A phase whose line is not logged (dummy
weights, `--enforce-eager`) is part of the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from vllm_gptoss.cli.bench import worker

STOCK = "stock"
ENGINE = "start of the engine's process"
READY = "Application startup complete"
CAPTURE, CAPTURED = r"Capturing CUDA graphs.*:\s+0%", "Graph capturing finished"
PHASES = (
    ("imports of the API server", "non-default args: ", True),
    (f"configuration, tokenizer, {ENGINE}", ENGINE, True),
    ("imports of the engine", r"Initializing a V\d LLM engine", True),
    ("device, groups", "Loading model from scratch|Starting to load model", False),
    ("model object", "Initializing model took", False),
    ("weights", "Loading weights took", False),
    ("layout of the weights", "Model loading took", False),
    ("torch.compile", r"torch\.compile.* took .* in total", False),
    ("profiling run", "Initial profiling/warmup run took", False),
    ("preparation of the graphs' estimate", CAPTURE, False),
    ("graphs for the memory estimate", CAPTURED, False),
    ("memory profile", "Available KV cache memory|skipped memory profiling", False),
    ("KV cache", "KV cache size: ", True),
    ("warm-up", CAPTURE, False),
    ("graphs", CAPTURED, False),
    ("end of the warm-up", "init engine .* took", True),
    ("scheduler, tokenizer of the engine", "Supported tasks: ", True),
    ("routes and tools", "Starting vLLM server on ", True),
    ("first request possible", READY, True),
)
"""Phases in order: name, the line that ends it, and whether vLLM 0.32 and 0.33 always log that line. `phases` looks for
later lines only up to the next one that is always logged."""

KERNELS = re.compile(r"kernels of the fused layers: ready after ([\d.]+) s")
CORE = re.compile(r"\(EngineCore\w* pid=(\d+)\)")


def phases(lines: Iterable[tuple[float, str]]) -> dict[str, float]:
    """Seconds of each phase of a log. lines: time of arrival after the start in seconds, and text."""
    found: dict[str, float] = {}
    before, following = 0.0, 0
    for at, text in lines:
        for place, (name, pattern, is_always_logged) in enumerate(PHASES[following:], following + 1):
            if re.search(pattern, text):
                found[name], before, following = at - before, at, place
                break
            if is_always_logged:
                break
    return found


def _until_ready(process: subprocess.Popen[str], began: float) -> Iterator[tuple[float, str]]:
    """Lines of a server until it accepts requests, and the start of the engine's process before its first line."""
    assert process.stdout is not None
    is_known = False
    for text in process.stdout:
        at = time.monotonic() - began
        if not is_known and (engine := CORE.search(text)):
            is_known = True
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                both = [psutil.Process(pid).create_time() for pid in (process.pid, int(engine[1]))]
                yield min(at, both[1] - both[0]), ENGINE
        yield at, text
        if READY in text:
            return


def start(arguments: list[str], environment: dict[str, str], timeout: float) -> dict[str, Any]:
    """Starts `vllm serve` with these arguments until it accepts requests, and ends it. Returns the row of the result.

    Raises:
        typer.BadParameter: it ended, or took longer than `timeout` seconds; the message has the end of its log.
    """
    where = ["--host", "127.0.0.1", "--port", str(worker.free_port())]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments, *where]
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    limit = threading.Timer(timeout, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        lines = list(_until_ready(process, began))
        log = "".join(text for _, text in lines)
        if READY not in log:
            raise typer.BadParameter(f"vllm serve did not start:\n{log[-8000:]}")
        kernels = KERNELS.search(log)
        return {
            "seconds": lines[-1][0],
            "phases": phases(lines),
            "kernels": float(kernels[1]) if kernels else 0.0,
            "processor_seconds": [
                sum(psutil.Process(pid).cpu_times()[:2]) for pid in [process.pid, *map(int, set(CORE.findall(log)))]
            ],
        }
    finally:
        process.terminate()
        process.communicate()  # until the engine has ended as well; the limit holds for this too
        limit.cancel()


def main(
    model: Annotated[str, typer.Argument(help="a checkpoint directory, or a name on Hugging Face")],
    arguments: Annotated[list[str] | None, typer.Argument(help="further arguments of vllm serve, after --")] = None,
    variants: Annotated[
        list[str] | None, typer.Option("--variant", help="plugin, stock, or stock with a --moe-backend of vLLM")
    ] = None,
    repeats: Annotated[int, typer.Option(help="starts of each variant")] = 1,
    timeout: Annotated[float, typer.Option(help="seconds for one start")] = 900,
    out: Annotated[Path | None, typer.Option(help="JSON file for the result")] = None,
) -> None:
    """Prints the seconds of each phase of a start of vllm serve."""
    rows = []
    for variant in [each for each in variants or (worker.PLUGIN, STOCK) for _ in range(repeats)]:
        words = [model, *(arguments or [])]
        for name, value in ({} if variant == STOCK else worker.variant_options(variant)).items():
            words += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
        environment = worker.environment(variant) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONUNBUFFERED": "1"}
        row = start(words, environment, timeout)
        rows.append({"variant": variant, **row})
        typer.echo(f"{variant}: {row['seconds']:.1f} s, of them {row['kernels']:.1f} for the plugin's kernels")
        typer.echo("\n".join(f"{seconds:8.1f}  {name}" for name, seconds in row["phases"].items()))
    if out:
        out.write_text(json.dumps({"command": sys.argv[1:], "rows": rows}, indent=1) + "\n")
