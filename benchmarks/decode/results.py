"""The benchmark's file: raw measurements of many runs, and the rows that follow from them.

`{"gpu", "vllm", "torch", "date", "command", "rows": […], "engines": […], "measurements": […], "failures": […]}`. Rows
and engines are recalculated when measurements are added, so runs of one machine add up: a run that was cut short
is continued by the same command, and files are merged.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import shapes
from benchmarks.decode import floor
from benchmarks.decode.worker import EngineRun, put
from vllm_gptoss.cli.bench.worker import is_plugin

SETTING = ("prompt", "output", "tensor_parallel", "skew", "eagle3", "accepted", "draft_vocabulary", "options")
"""Fields of a job that must be equal for two measurements to be compared."""
_DEFAULTS = {field.name: field for field in dataclasses.fields(EngineRun)}


class ResultsError(ValueError):
    """A results file that cannot be used; the message has the remedy."""


def setting(of: EngineRun | dict[str, Any]) -> dict[str, Any]:
    """How a job, or a measurement of a file, was served. The first published file names none: what was fixed then."""
    if isinstance(of, EngineRun):
        return {name: getattr(of, name) for name in SETTING}
    found = of.get("setting", {})
    return {name: found[name] if name in found else _default(name) for name in SETTING}


def _default(name: str) -> Any:
    return {} if name == "options" else _DEFAULTS[name].default


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """(median, (largest - smallest) / median)."""
    middle = statistics.median(values)
    return middle, (max(values) - min(values)) / middle


class Results:
    """Measurements of one machine and one vLLM.

    Raises:
        ResultsError: from `add_run` and `read`, where the file is of another machine or version.
    """

    def __init__(self, head: dict[str, Any] | None = None) -> None:
        self.head: dict[str, Any] = head or {}
        self.measurements: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []

    @classmethod
    def read(cls, path: Path) -> Results:
        try:
            record = json.loads(path.read_text())
            results = cls({key: record[key] for key in ("gpu", "vllm", "torch", "date", "command")})
            results.measurements = list(record["measurements"])
        except (OSError, ValueError, KeyError) as error:
            raise ResultsError(f"{path} is not a results file ({error!r}): name another with --out") from None
        results.failures = record.get("failures", [])
        return results

    def merge(self, other: Results) -> None:
        """Appends another file's rounds."""
        self.must_match(other.head)
        for measurement in other.measurements:
            self._rounds(measurement["model"], measurement["variant"], setting(measurement)).extend(
                measurement["rounds"]
            )
        self.failures += other.failures

    def must_match(self, head: dict[str, Any]) -> None:
        for key in ("gpu", "vllm"):
            if self.head and self.head[key] != head[key]:
                raise ResultsError(f"{key} is {head[key]} here and {self.head[key]} in the file: use another --out")

    def done(self, job: EngineRun, batch: int) -> int:
        """How many rounds of a job have measured `batch`."""
        rounds = self._rounds(job.model, job.variant, setting(job))
        return sum(any(row["batch"] == batch for row in one["rows"]) for one in rounds)

    def add_run(self, job: EngineRun, record: dict[str, Any]) -> None:
        """Adds what one process measured."""
        self._rounds(job.model, job.variant, setting(job)).append(record)

    def add_failure(self, job: EngineRun, why: str) -> None:
        self.failures.append({"model": job.model, "variant": job.variant, "setting": setting(job), "why": why})

    def _rounds(self, model: str, variant: str, of: dict[str, Any]) -> list[dict[str, Any]]:
        for found in self.measurements:
            if (found["model"], found["variant"], setting(found)) == (model, variant, of):
                return found["rounds"]  # type: ignore[no-any-return]
        new: dict[str, Any] = {"model": model, "variant": variant, "setting": of, "rounds": []}
        self.measurements.append(new)
        return new["rounds"]  # type: ignore[no-any-return]

    def write(self, path: Path) -> None:
        """Replaces the whole file."""
        measured = [of for of in self.measurements if of["rounds"]]
        record = {
            **self.head,
            "rows": summarise(measured, self.head["gpu"]),
            "engines": engines(measured),
            "measurements": measured,
            "failures": self.failures,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, json.dumps(record, indent=1) + "\n")


def _groups(measurements: Iterable[dict[str, Any]]) -> list[tuple[str, dict[str, Any], dict[str, list[Any]]]]:
    """(model, setting, rounds by variant), in the order of the file."""
    groups: list[tuple[str, dict[str, Any], dict[str, list[Any]]]] = []
    for of in measurements:
        key = (of["model"], setting(of))
        group = next((group for group in groups if group[:2] == key), None)
        if group is None:
            groups.append(group := (*key, {}))
        group[2].setdefault(of["variant"], []).extend(of["rounds"])
    return groups


def summarise(measurements: Iterable[dict[str, Any]], gpu: str) -> list[dict[str, Any]]:
    """One row per model, setting and batch: the best stock backend at that batch against every plugin variant.

    `gpu` is the name in the file's head. A row has a memory floor where `shapes.BANDWIDTHS` has that GPU.
    """
    rows = []
    for model, of, variants in _groups(measurements):
        batches = sorted({row["batch"] for rounds in variants.values() for one in rounds for row in one["rows"]})
        for batch in batches:
            figures = {name: _figures(rounds, batch) for name, rounds in variants.items()}
            figures = {name: found for name, found in figures.items() if found}
            stock = {name: found for name, found in figures.items() if not is_plugin(name)}
            best = min(stock, key=lambda name: stock[name]["tpot_ms"], default=None)
            prefill = min((found["prefill_ms"] for found in stock.values()), default=None)
            theirs = {f"stock_{key}": value for key, value in (stock[best] if best else _NOTHING).items()}
            for variant in (name for name in figures if is_plugin(name)):
                ours = {f"plugin_{key}": value for key, value in figures[variant].items()}
                same = {"model": model, "batch": batch, **{key: of[key] for key in SETTING}}
                row = {**same, "stock_backend": best, **theirs, "plugin": variant, **ours}
                row["stock_prefill_ms"] = prefill
                row |= _floor(model, of, batch, figures[variant], gpu)
                rows.append({**row, **_derived(of, batch, figures[variant], stock[best] if best else None)})
    return rows


_NOTHING: dict[str, float | None] = dict.fromkeys(("tpot_ms", "spread", "decode_ms", "gpu_ms", "host_ms", "prefill_ms"))


def _figures(rounds: Sequence[dict[str, Any]], batch: int) -> dict[str, Any]:
    """Medians over repeats and rounds; empty where no round got to this batch."""
    rows = [row for one in rounds for row in one["rows"] if row["batch"] == batch]
    if not rows:
        return {}
    tpot, spread = median_and_spread([value for row in rows for value in row["tpot_ms"]])
    decode, gpu = ([row[key] for row in rows if key in row] for key in ("decode_ms", "gpu_ms"))
    host = [value for row in rows for value in row.get("host_ms", ())]
    prefill = statistics.median(value for row in rows for value in row["prefill_ms"])
    return {
        "tpot_ms": tpot,
        "spread": spread,
        "decode_ms": statistics.median(decode) if decode else None,
        "gpu_ms": statistics.median(gpu) if gpu else None,
        "host_ms": statistics.median(host) if host else None,
        "prefill_ms": prefill,
    }


def _floor(model: str, of: dict[str, Any], batch: int, ours: dict[str, Any], gpu: str) -> dict[str, Any]:
    speed = floor.bandwidth(gpu)
    if speed is None:
        return {"floor_ms": None, "share_of_floor": None}
    context = of["prompt"] + of["output"] // 2
    parallel, verified = of["tensor_parallel"], 1 + of["eagle3"]
    cached = 1 if str(of["options"].get("kv_cache_dtype", "")).startswith("fp8") else 2
    read = floor.read_bytes(shapes.shape(model), batch, context, parallel, of["skew"], verified, cached)
    floor_ms = 1e3 * read / speed / (of["accepted"] or 1)  # of a token, as the times are
    return {"floor_ms": floor_ms, "share_of_floor": floor_ms / ours["gpu_ms"] if ours["gpu_ms"] else None}


def _derived(of: dict[str, Any], batch: int, ours: dict[str, Any], stock: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "ratio": stock["tpot_ms"] / ours["tpot_ms"] if stock else None,
        "tokens_per_s_user": 1e3 / ours["tpot_ms"],
        "tokens_per_s_gpu": 1e3 * batch / ours["tpot_ms"] / of["tensor_parallel"],
    }


def engines(measurements: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Start, KV cache and memory of every variant, medians over its processes."""
    found = []
    for of in measurements:
        entry = {"model": of["model"], "variant": of["variant"], **setting(of), "processes": len(of["rounds"])}
        for key in ("start_s", "kv_blocks", "load_peak_gib", "used_gib"):
            values = [one[key] for one in of["rounds"] if one.get(key) is not None]
            entry[key] = statistics.median(values) if values else None
        kv = [one["memory"][0]["kv_gib"] for one in of["rounds"] if one.get("memory")]
        found.append({**entry, "kv_gib": statistics.median(kv) if kv else None})
    return found
