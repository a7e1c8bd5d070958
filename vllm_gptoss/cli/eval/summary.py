"""The figures of a run, calculated from its lines."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_gptoss.cli.eval import intervals, record
from vllm_gptoss.cli.eval.answer import LOST, Fate
from vllm_gptoss.cli.eval.published import published
from vllm_gptoss.cli.eval.record import Kept, Key

EFFORTS = ("low", "medium", "high")


def summarise(folder: Path) -> dict[str, Any]:
    """`{"run", "rows": one an eval and effort, "asked", "lost", "complete"}`.

    Accuracy counts the answers: right, wrong, cut, empty and unparsed. Samples that were lost are not in it; `worst`
    and `best` are the bounds with them.
    """
    head = record.read_head(folder)
    samples = record.kept(folder)
    groups: dict[tuple[str, str], dict[Key, Kept]] = {}
    for key, one in samples.items():
        groups.setdefault(key[:2], {})[key] = one
    plan: Mapping[str, Any] = head.get("evals", {})
    order = {name: place for place, name in enumerate(plan)}
    names = sorted(groups, key=lambda group: (order.get(group[0], 99), _rank(group[1]), group[1]))
    rows = [_row(head, name, effort, groups[name, effort]) for name, effort in names]
    lost = sum(row["lost"] for row in rows)
    asked = sum(row["samples"] for row in rows)
    planned = sum(int(one["questions"]) * int(one["repeats"]) for one in plan.values()) * len(head.get("efforts", [""]))
    return {
        "run": head,
        "rows": rows,
        "planned": planned,
        "asked": asked,
        "lost": lost,
        "complete": asked == planned and not lost,
    }


def _rank(effort: str) -> int:
    return EFFORTS.index(effort) if effort in EFFORTS else len(EFFORTS)


def _row(head: Mapping[str, Any], name: str, effort: str, samples: Mapping[Key, Kept]) -> dict[str, Any]:
    scores: dict[str, list[int]] = {}
    for key, one in samples.items():
        if one.fate not in LOST:
            scores.setdefault(key[2], []).append(int(one.fate is Fate.RIGHT))
    fates = Counter(one.fate for one in samples.values())
    n, lost = len(samples), sum(fates[fate] for fate in LOST)
    mean, low, high = intervals.accuracy(list(scores.values()))
    answers = [one for one in samples.values() if one.fate not in LOST]
    return {
        "eval": name,
        "effort": effort or None,
        "samples": n,
        "questions": len({key[2] for key in samples}),
        "lost": lost,
        "accuracy": mean if answers else None,
        "low": low,
        "high": high,
        "worst": fates[Fate.RIGHT] / n if n else None,
        "best": (fates[Fate.RIGHT] + lost) / n if n else None,
        "fates": {fate.value: fates[fate] for fate in Fate},
        "output_tokens": _spread([one.output for one in answers]),
        "reasoning_tokens": _spread([one.reasoning for one in answers]),
        "seconds": _spread([one.seconds for one in answers]),
        "first_s": _spread([one.first_s for one in answers if one.first_s is not None]),
        "tries_again": sum(max(0, one.tries - 1) for one in samples.values()),
        "parts": _parts(samples.values()),
        "published": [
            {"percent": one.percent, "source": one.source} for one in published(head.get("published"), name, effort)
        ],
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, 95th percentile and total."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "total": float(sum(ordered)),
    }


def _parts(samples: Iterable[Kept]) -> dict[str, dict[str, float]]:
    good: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for one in samples:
        for name, right, of in one.parts:
            if of:
                good[name] += right
                total[name] += of
    found = {}
    for name, of in total.items():
        low, high = intervals.wilson(good[name], of)
        found[name] = {"good": float(good[name]), "of": float(of), "low": low, "high": high}
    return found
