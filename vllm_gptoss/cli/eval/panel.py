"""The panel to look at: a table in the terminal, and one HTML file that needs nothing else."""

from __future__ import annotations

import html
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


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2em;color:#222}table{border-collapse:collapse;margin:1em 0}
td,th{padding:.35em .8em;border-bottom:1px solid #ddd;text-align:left}th{font-weight:600}
.bar{position:relative;width:22em;height:1.2em;background:#f0f0f0}
.bar i{position:absolute;top:0;bottom:0;left:0;background:#4c78a8}
.bar b{position:absolute;top:40%;height:20%;background:#222}
.bar u{position:absolute;top:-10%;bottom:-10%;width:2px;background:#e45756}
.warn{color:#a40000}pre{background:#f7f7f7;padding:1em;overflow:auto}"""


def page(summary: Mapping[str, Any]) -> str:
    """The panel as HTML. Everything that came from a server or a file is escaped; there is no script in it."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in ("", *COLUMNS))
    body = "".join(
        f"<tr><td>{_bar(row)}</td>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells(row))}</tr>"
        for row in summary["rows"]
    )
    said = "".join(f"<li>{html.escape(note)}</li>" for note in notes(summary))
    settings = html.escape("\n".join(f"{key}: {value}" for key, value in summary["run"].items()))
    state = "" if summary["complete"] else '<p class="warn">This run is not complete: see the notes.</p>'
    title = html.escape(_title(summary))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1>{state}<table><tr>{head}</tr>{body}</table>"
        f"<p>Blue: accuracy; black: its 95 % interval; red: published values.</p>"
        f"<ul>{said}</ul><h2>How it was asked</h2><pre>{settings}</pre></html>\n"
    )


def _bar(row: Mapping[str, Any]) -> str:
    if row["accuracy"] is None:
        return ""
    low, high = 100 * row["low"], 100 * row["high"]
    marks = "".join(f'<u style="left:{one["percent"]:.1f}%"></u>' for one in row["published"])
    return (
        f'<div class="bar"><i style="width:{100 * row["accuracy"]:.1f}%"></i>'
        f'<b style="left:{low:.1f}%;width:{high - low:.1f}%"></b>{marks}</div>'
    )


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
