"""`vllm-gptoss bench host --gpu`: what the engine's thread does for a decode step while the GPU does its part.

Three engines on the same GPU, one after another, with dummy weights as `bench decode` starts them: stock vLLM, the
plugin with `host=stock`, and the plugin; in the process of the caller and in one of their own, as a server has it. TPOT
is about the larger of GPU and host time. The host's is the processor time of the engine's thread, which sleeps while it
waits for the GPU; with two layers of a model (`20b:2`) the GPU is so fast that TPOT is the host's time too.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import typer

from vllm_gptoss.bench import decode
from vllm_gptoss.bench.worker import PLUGIN, EngineRun

VARIANTS = ("triton", f"{PLUGIN}:host=stock", PLUGIN)
"""Stock vLLM by its default expert kernels, and the plugin without and with its model runner."""
ENGINES = ("in-process", "own process")


def jobs(models: str, batches: str, engines: str, variants: str) -> Iterator[EngineRun]:
    """One for each process to start. All arguments are lists with commas."""
    for model in models.split(","):
        for engine in engines.split(","):
            if engine not in ENGINES:
                raise typer.BadParameter(f"{engine!r}: engines are {', '.join(ENGINES)}")
            for variant in variants.split(","):
                sizes = tuple(int(batch) for batch in batches.split(","))
                yield EngineRun(model, variant, sizes, prompt=128, own_process=engine == ENGINES[1])


def measure(found: Iterator[EngineRun], keep: Callable[[dict[str, Any]], None]) -> None:
    """Runs jobs and hands over the record after each."""
    record: dict[str, Any] = {"rows": [], "failures": []}
    for job in found:
        result, why = decode.run_worker(job)
        record.update({key: result[key] for key in ("gpu", "torch") if key in result})
        record["rows"] += [row(job, measured) for measured in result["rows"]]
        if why:
            record["failures"].append({**dataclasses.asdict(job), "why": why})
        keep(record)


def row(job: EngineRun, measured: dict[str, Any]) -> dict[str, Any]:
    """Medians in ms a step, and each repeat of TPOT."""
    return {
        "model": job.model,
        "engine": ENGINES[job.own_process],
        "variant": job.variant,
        "batch": measured["batch"],
        "tpot_ms": round(statistics.median(measured["tpot_ms"]), 3),
        "gpu_ms": round(measured["gpu_ms"], 3) if "gpu_ms" in measured else None,
        "host_ms": round(statistics.median(measured["host_ms"]), 3),
        "tpots_ms": [round(each, 3) for each in measured["tpot_ms"]],
    }
