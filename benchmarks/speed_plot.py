"""Draws the README's table of decode speed and the memory floor: `python benchmarks/speed_plot.py`.

Takes the result files that the table names, and the same figures of them. Needs matplotlib.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from tables import BLOCK, RESULTS, ROOT, Row, by_batch, decode_ms, result

OUT = RESULTS / "speed-h200-2026-11-27.png"


def files() -> list[Row]:
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    names = next(names for _, kind, names, _ in blocks if kind == "speed")
    return [result(name) for name in names.split()]


def panel(axis: Any, model: str, rows: dict[int, Row]) -> None:
    batches = sorted(rows)
    stock, ours = zip(*(decode_ms(rows[batch]) for batch in batches), strict=True)
    for values, style, label in (
        (stock, "s--", "vLLM"),
        (ours, "o-", "vllm-gptoss"),
        ([rows[batch]["floor_ms"] for batch in batches], "k-", "memory floor"),
    ):
        axis.plot(batches, values, style, label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.set(title=f"gpt-oss-{model}, one H200", xlabel="requests decoding at once", ylabel="ms per token")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()


def main() -> None:
    models = by_batch(files())
    figure = Figure(figsize=(5.5 * len(models), 4), layout="constrained")
    for axis, (model, rows) in zip(figure.subplots(1, len(models)), models.items(), strict=True):
        panel(axis, model, rows)
    figure.savefig(OUT, dpi=110)


if __name__ == "__main__":
    main()
