"""The figures of a run, calculated from its lines, and their table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_gptoss.cli.eval import intervals, record
from vllm_gptoss.cli.eval.judge import LOST, Outcome
from vllm_gptoss.cli.eval.published import EFFORTS, published

COLUMNS = ("eval", "effort", "%", "95 %", "published", "samples", "lost", "tokens", "seconds")


def groups(folder: Path) -> dict[tuple[str, str], dict[record.Key, dict[str, Any]]]:
    """The samples of each (eval, effort), in the order of the efforts."""
    found: dict[tuple[str, str], dict[record.Key, dict[str, Any]]] = defaultdict(dict)
    for key, one in record.kept(folder).items():
        found[key[:2]][key] = one
    return {key: found[key] for key in sorted(found, key=lambda key: (key[0], (*EFFORTS, key[1]).index(key[1])))}


def scores(samples: Mapping[record.Key, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Of each question its answered repeats, 0 or 1."""
    found: dict[str, list[int]] = {key[2]: [] for key in samples}
    for key, one in samples.items():
        if one["outcome"] not in LOST:
            found[key[2]].append(int(one["outcome"] is Outcome.RIGHT))
    return found


def summarise(folder: Path) -> dict[str, Any]:
    """`{"run", "rows": one an eval and effort, "planned", "complete"}`.

    Accuracy counts the answers; `worst` and `best` are its bounds with the lost samples.
    """
    head = record.read_head(folder)
    rows = [_row(head, *key, samples) for key, samples in groups(folder).items()]
    planned = sum(one["questions"] * one["repeats"] for one in head["evals"].values()) * len(head["efforts"])
    complete = planned == sum(row["samples"] - row["lost"] for row in rows)
    return {"run": head, "rows": rows, "planned": planned, "complete": complete}


def _row(head: Mapping[str, Any], name: str, effort: str, samples: Mapping[record.Key, Any]) -> dict[str, Any]:
    answers = [one for one in samples.values() if one["outcome"] not in LOST]
    outcomes = Counter(one["outcome"] for one in samples.values())
    n, lost, right = len(samples), len(samples) - len(answers), outcomes[Outcome.RIGHT]
    by_question = scores(samples)
    mean, low, high = intervals.accuracy([one for one in by_question.values() if one])
    seconds = sorted(one["seconds"] for one in answers)
    return {
        "eval": name, "effort": effort, "samples": n, "questions": len(by_question), "lost": lost,
        "accuracy": mean if answers else None, "low": low, "high": high, "worst": right / n, "best": (right + lost) / n,
        "outcomes": {outcome.value: outcomes[outcome] for outcome in Outcome},
        "output_tokens": fmean(one["tokens"] for one in answers) if answers else None,
        "seconds": [median(seconds), seconds[int(0.95 * len(seconds))]] if seconds else None,
        "published": published(head["published"], name, effort),
    }  # fmt: skip


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def show(summary: Mapping[str, Any], console: Console) -> None:
    """Prints the table and its notes."""
    run = summary["run"]
    title = f"{run['model']} over {run['api']}, {run['date'][:10]}"
    table = Table(*COLUMNS, title=title, title_justify="left", box=None, padding=(0, 1))
    notes = []
    for row in summary["rows"]:
        name, tokens, seconds = f"{row['eval']} {row['effort']}".strip(), row["output_tokens"], row["seconds"]
        table.add_row(
            row["eval"], row["effort"] or "-", percent(row["accuracy"]),
            f"{percent(row['low'])}-{percent(row['high'])}",
            "/".join(f"{value:.1f}" for value, _ in row["published"]) or "-", str(row["samples"]), str(row["lost"]),
            f"{tokens:.0f}" if tokens else "-", "/".join(f"{one:.1f}" for one in seconds or ()) or "-",
        )  # fmt: skip
        counts = ", ".join(f"{count} {one.replace('_', ' ')}" for one, count in row["outcomes"].items() if count)
        notes.append(f"{name}: {row['questions']} questions, {row['samples']} samples: {counts}")
        if row["lost"]:
            notes.append(
                f"{name}: {row['lost']} of {row['samples']} samples were lost and are not in the accuracy; were all of "
                f"them right or wrong, it would be {percent(row['best'])} or {percent(row['worst'])}"
            )
    if (missing := summary["planned"] - sum(row["samples"] for row in summary["rows"])) > 0:
        notes.append(f"{missing} of {summary['planned']} samples are missing: the same command continues")
    notes.append("tokens: mean of a sample, reasoning too; seconds: median/95th percentile")
    sources = {source: None for row in summary["rows"] for _, source in row["published"]}
    console.print(table)
    for note in (*notes, *(f"published: {source}" for source in sources)):
        console.print(note, markup=False, highlight=False)
