"""When EAGLE3 drafts pay: rows of result files with drafts, and plain rows of the same model, GPUs and requests.

`tables.py` writes them to recipes/drafts.json, which `vllm-gptoss recipe plan` reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_gptoss.cli.bench.worker import is_plugin
from vllm_gptoss.cli.recipes.schema import SPECS
from vllm_gptoss.engine.choose import devices

Row = dict[str, Any]

SIZES = {"gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_seqs"}
"""Options of vLLM that fit an engine to its GPU's memory. Rows with other options are not compared."""
WORK = ("model", "gpu", "tensor_parallel", "batch", "prompt", "output")


def compared(files: Iterable[Row]) -> list[Row]:
    """A row for each model, GPUs, requests and drafts, by TPOT: the newest file's fastest variant of the plugin, and
    the fastest plain one of the same file, else of the newest file. No row where no plain row was measured."""
    measured = [{**row, **_head(file)} for file in files for row in file.get("rows", ()) if _counts(row)]
    plain: dict[tuple[Any, ...], list[Row]] = {}
    newest: dict[tuple[Any, ...], Row] = {}
    for row in sorted(measured, key=lambda row: (row["date"], -row["plugin_tpot_ms"])):
        work = tuple(row[key] for key in WORK)
        if row["eagle3"]:
            newest[(*work[:4], row["eagle3"])] = row
        else:
            plain.setdefault(work, []).append(row)
    found = []
    for key in sorted(newest):
        row = newest[key]
        if others := plain.get(tuple(row[name] for name in WORK)):
            same_file = [other for other in others if other["file"] == row["file"]]
            found.append(_row(row, (same_file or others)[-1]))
    return found


def _head(file: Row) -> Row:
    return {key: file[key] for key in ("gpu", "date", "file")}


def _counts(row: Row) -> bool:
    """Whether it is a row of `benchmarks.decode` of a whole model with the plugin, on the usual settings."""
    if row.get("model") not in SPECS or "eagle3" not in row or not set(row["options"]) <= SIZES:
        return False
    if row["skew"] or row.get("draft_vocabulary"):
        return False
    return is_plugin(row["plugin"]) and row["plugin_tpot_ms"] is not None


def _row(row: Row, plain: Row) -> Row:
    accepted = row.get("accepted") or 1  # no draft was accepted: the model's own token
    return {
        "model": row["model"],
        "device": devices.named(row["gpu"]).name,
        "gpus": row["tensor_parallel"],
        "requests": row["batch"],
        "drafts": row["eagle3"],
        "accepted": accepted,
        "plain_ms": round(plain["plugin_tpot_ms"], 2),
        "drafts_ms": round(row["plugin_tpot_ms"], 2),
        "break_even": round(row["plugin_tpot_ms"] * accepted / plain["plugin_tpot_ms"], 2),
    }
