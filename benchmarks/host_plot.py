"""Draws what a decode step takes of the host, from result files: `python benchmarks/host_plot.py`; needs matplotlib.

Left: ms per token for two layers of the 20b. These need so little GPU time that the engine's thread limits the rate.
Right: one stream of the whole 20b as served, with a dedicated core for the engine, and with a core shared with two busy
processes.
"""

from __future__ import annotations

import statistics
from typing import Any

from matplotlib.figure import Figure
from tables import RESULTS, result


def pace(axis: Any) -> None:
    rows = result("host-step-h200-2026-11-25.json")["either_way"]
    batches = [str(row["batch"]) for row in rows]
    for key, label, style in (("greedy_vllm", "vLLM", "s--"), ("greedy_both", "vllm-gptoss", "o-")):
        axis.plot(batches, [statistics.median(row[key]) for row in rows], style, label=label)
    axis.plot(batches, [row["gpu_both"] for row in rows], "k-", label="GPU busy")
    axis.set(title="two layers of the 20b, one H200", xlabel="requests decoding at once", ylabel="ms per token")


def slow_host(axis: Any) -> None:
    stock = result("host-slow-h100-2026-11-25.json")
    ours = result("host-slow-2026-11-26.json")["h100"]["rows"]

    def of_stock(kind: str) -> float:
        row = next(row for row in stock[kind] if row["server"].startswith("stock") and row["streams"] == 1)
        return float(row["ms_a_token"])

    def of_ours(label: str) -> float:
        return statistics.median(row["ms_a_token"] for row in ours if (row["label"], row["streams"]) == (label, 1))

    bars = {
        "vLLM": (of_stock("quiet"), of_stock("two_busy_processes_on_that_core")),
        "vllm-gptoss": (of_ours("auto quiet"), of_ours("auto busy")),
    }
    for at, (label, values) in enumerate(bars.items()):
        axis.bar_label(axis.bar([place + at * 0.4 for place in (0, 1)], values, 0.38, label=label), fmt="%.2f")
    axis.axhline(stock["gpu_ms_a_step"]["1"], color="k", label="GPU busy")
    axis.set_xticks([0.2, 1.2], ["a dedicated core", "a third of a core"])
    axis.set(title="the 20b as served, one stream, H100s", ylabel="ms per token")


def main() -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    for draw, axis in zip((pace, slow_host), figure.subplots(1, 2), strict=True):
        draw(axis)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(RESULTS / "host-2026-11-26.png", dpi=110)


if __name__ == "__main__":
    main()
