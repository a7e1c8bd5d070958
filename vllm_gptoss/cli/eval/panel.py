"""The panel: a table in the terminal, the same as an HTML file, and the table of a comparison."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_gptoss.cli.eval.compare import Comparison

COLUMNS = ("eval", "effort", "%", "95 %", "published", "samples", "lost", "tokens", "seconds")
SHOWN_FLIPS = 20


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of the table, as text."""
    tokens, seconds = row["output_tokens"], row["seconds"]
    return (
        row["eval"],
        row["effort"] or "-",
        percent(row["accuracy"]),
        f"{percent(row['low'])}-{percent(row['high'])}" if row["accuracy"] is not None else "-",
        "/".join(f"{one['percent']:.1f}" for one in row["published"]) or "-",
        str(row["samples"]),
        str(row["lost"]),
        f"{tokens['mean']:.0f}" if tokens and tokens["total"] else "-",
        f"{seconds['median']:.1f}/{seconds['p95']:.1f}" if seconds else "-",
    )


def notes(summary: Mapping[str, Any]) -> list[str]:
    """What a reader has to know besides the table."""
    found = []
    for row in summary["rows"]:
        name = f"{row['eval']} {row['effort'] or ''}".strip()
        counts = ", ".join(f"{count} {fate.replace('_', ' ')}" for fate, count in row["fates"].items() if count)
        found.append(f"{name}: {row['questions']} questions, {row['samples']} samples: {counts}")
        if row["lost"]:
            found.append(
                f"{name}: {row['lost']} of {row['samples']} samples were lost and are not in the accuracy; were all of "
                f"them right or wrong, it would be {percent(row['best'])} or {percent(row['worst'])}"
            )
        for part, one in row["parts"].items():
            share = percent(one["good"] / one["of"])
            found.append(f"{name}: {part} {one['good']:.0f} of {one['of']:.0f} ({share} %)")
    missing = summary["planned"] - summary["asked"]
    if missing > 0:
        found.append(f"{missing} of {summary['planned']} samples are missing: the same command continues")
    sources = {one["source"]: None for row in summary["rows"] for one in row["published"]}
    found.append(
        "%: accuracy and its 95 % interval; tokens: mean of a sample, reasoning too; seconds: median/95th percentile"
    )
    return [*found, *(f"published: {source}" for source in sources)]


def show(summary: Mapping[str, Any], console: Console) -> None:
    """Prints the panel."""
    table = Table(title=_title(summary), title_justify="left", box=None, padding=(0, 1))
    for column in COLUMNS:
        table.add_column(column, overflow="fold", no_wrap=column != "eval")
    for row in summary["rows"]:
        table.add_row(*cells(row))
    console.print(table)
    for note in notes(summary):
        console.print(note, markup=False, highlight=False)


def _title(summary: Mapping[str, Any]) -> str:
    run = summary["run"]
    return f"{run['model']} over {run['api']}, {run['date'][:10]}"


def page(summary: Mapping[str, Any]) -> str:
    """The panel and the run's settings as HTML, which needs nothing else and has no script."""
    console = Console(record=True, file=io.StringIO(), width=160)
    show(summary, console)
    for key, value in summary["run"].items():
        console.print(f"{key}: {value}", markup=False, highlight=False)
    return console.export_html()


def show_comparison(found: Comparison, console: Console) -> None:
    """Prints a comparison: one row an eval and effort, then the questions that flipped."""
    for key, (before, after) in found.settings.items():
        console.print(f"{key}: {before!r} before, {after!r} after", markup=False, highlight=False)
    columns = ("eval", "effort", "questions", "before", "after", "difference", "95 % interval", "worse", "better", "p")
    table = Table(box=None, padding=(0, 1))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in found.rows:
        one = row.difference
        table.add_row(
            row.eval, row.effort or "-", str(row.questions), percent(row.before), percent(row.after),
            f"{100 * one.mean:+.1f}", f"{100 * one.low:+.1f} to {100 * one.high:+.1f}", str(row.worse), str(row.better),
            f"{one.p:.3f}",
        )  # fmt: skip
    console.print(table)
    for row in found.rows:
        for line in _said(row):
            console.print(line, markup=False, highlight=False)


def _said(row: Any) -> list[str]:
    name = f"{row.eval} {row.effort}".strip()
    lines = [f"{name}: {row.verdict}"]
    if row.unpaired or row.lost:
        lines.append(f"{name}: left out: {row.unpaired} questions of one run only, {row.lost} that a run lost")
    for which, before, after in row.flipped[:SHOWN_FLIPS]:
        lines.append(f"{name}: {which} went from {percent(before)} to {percent(after)}")
    if (more := row.worse + row.better - SHOWN_FLIPS) > 0:
        lines.append(f"{name}: {more} more questions differ: --json lists them")
    return lines
