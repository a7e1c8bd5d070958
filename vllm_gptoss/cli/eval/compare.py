"""Two runs over the same questions: what differs, which questions flipped, and whether it is more than chance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_gptoss.cli.eval import intervals, record
from vllm_gptoss.cli.eval.questions import EvalError
from vllm_gptoss.cli.eval.report import groups, percent, scores

SHOWN_FLIPS = 20
COLUMNS = ("eval", "effort", "questions", "before", "after", "difference", "95 % interval", "worse", "better", "p")


def compare(before: Path, after: Path, seed: int = 0) -> dict[str, Any]:
    """`{"rows": one an eval and effort, "settings": {name: (before, after)} that differ}`.

    Accuracies and their difference are over the questions that both have answers to. `flipped`: (question, mean score
    before, after), the worse first. `unpaired`: questions that only one run has; `lost`: those left out because a run
    lost all their samples.

    Raises:
        EvalError: they have no question in common, not the same questions under the same names, or one is no run.
    """
    heads = [record.read_head(path) for path in (before, after)]
    settings = record.differences(*heads)
    one, two = settings.pop("evals", ({}, {}))
    for name in one.keys() & two.keys():
        if one[name]["sha256"] != two[name]["sha256"]:
            raise EvalError(f"{name} was read from different files: the runs did not get the same questions")
    if "seed" in settings and all("gpqa" in head["evals"] for head in heads):
        raise EvalError("the runs have different seeds: the options of GPQA were in another order")
    runs = [{key: scores(samples) for key, samples in groups(path).items()} for path in (before, after)]
    rows = [_row(key, runs[0][key], runs[1][key], seed) for key in runs[0] if key in runs[1]]
    if not any(row["questions"] for row in rows):
        raise EvalError(f"{before} and {after} have no answered question in common")
    return {"rows": rows, "settings": settings}


def _row(
    key: tuple[str, str], before: Mapping[str, list[int]], after: Mapping[str, list[int]], seed: int
) -> dict[str, Any]:
    both = sorted(before.keys() & after.keys())
    pairs = [(which, fmean(before[which]), fmean(after[which])) for which in both if before[which] and after[which]]
    flips = [(which, one, two) for which, one, two in pairs if abs(one - two) > 1e-9]
    firsts, seconds = [one for _, one, _ in pairs], [two for _, _, two in pairs]
    difference = intervals.paired(firsts, seconds, seed)
    low, high = difference["low"], difference["high"]
    hidden = f"no difference shown; a loss of {max(0.0, -100 * low):.1f} points is not excluded"
    worse = sum(one > two for _, one, two in flips)
    return {
        "eval": key[0], "effort": key[1], "questions": len(pairs), "before": fmean(firsts) if pairs else 0.0,
        "after": fmean(seconds) if pairs else 0.0, "difference": difference,
        "verdict": "worse" if high < 0 else "better" if low > 0 else hidden,
        "flipped": sorted(flips, key=lambda flip: (flip[2] - flip[1], flip[0])), "worse": worse,
        "better": len(flips) - worse, "unpaired": len(before.keys() ^ after.keys()), "lost": len(both) - len(pairs),
    }  # fmt: skip


def show(found: Mapping[str, Any], console: Console) -> None:
    """Prints a comparison: one row an eval and effort, then the questions that flipped."""
    table = Table(*COLUMNS, box=None, padding=(0, 1))
    lines = [f"{key}: {before!r} before, {after!r} after" for key, (before, after) in found["settings"].items()]
    for row in found["rows"]:
        mean, low, high, p = row["difference"].values()
        table.add_row(
            row["eval"], row["effort"] or "-", str(row["questions"]), percent(row["before"]), percent(row["after"]),
            f"{100 * mean:+.1f}", f"{100 * low:+.1f} to {100 * high:+.1f}", str(row["worse"]), str(row["better"]),
            f"{p:.3f}",
        )  # fmt: skip
        notes = [row["verdict"]]
        if row["unpaired"] or row["lost"]:
            notes.append(f"left out: {row['unpaired']} questions of one run only, {row['lost']} that a run lost")
        notes += [f"{which} went from {percent(a)} to {percent(b)}" for which, a, b in row["flipped"][:SHOWN_FLIPS]]
        if (more := len(row["flipped"]) - SHOWN_FLIPS) > 0:
            notes.append(f"{more} more questions differ: --json lists them")
        lines += [f"{row['eval']} {row['effort']}".strip() + f": {note}" for note in notes]
    console.print(table)
    for line in lines:
        console.print(line, markup=False, highlight=False)
