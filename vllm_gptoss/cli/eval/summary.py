"""The figures of a run, calculated from its lines."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_gptoss.cli.eval import intervals, record
from vllm_gptoss.cli.eval.apis import LOST, Fate
from vllm_gptoss.cli.eval.published import EFFORTS, published
from vllm_gptoss.cli.eval.record import Key


def summarise(folder: Path) -> dict[str, Any]:
    """`{"run", "rows": one an eval and effort, "asked", "lost", "complete"}`.

    Accuracy counts the answers: right, wrong, cut, empty and unparsed. Samples that were lost are not in it; `worst`
    and `best` are the bounds with them.
    """
    head = record.read_head(folder)
    groups: dict[tuple[str, str], dict[Key, dict[str, Any]]] = defaultdict(dict)
    for key, one in record.kept(folder).items():
        groups[key[:2]][key] = one
    plan: Mapping[str, Any] = head.get("evals", {})
    order = {name: place for place, name in enumerate(plan)}
    names = sorted(groups, key=lambda group: (order.get(group[0], 99), rank(group[1])))
    rows = [_row(head, name, effort, groups[name, effort]) for name, effort in names]
    lost, asked = (sum(row[name] for row in rows) for name in ("lost", "samples"))
    planned = sum(int(one["questions"]) * int(one["repeats"]) for one in plan.values()) * len(head.get("efforts", [""]))
    complete = asked == planned and not lost
    return {"run": head, "rows": rows, "planned": planned, "asked": asked, "lost": lost, "complete": complete}


def rank(effort: str) -> tuple[int, str]:
    """Where an effort is listed: low, medium, high, others."""
    return EFFORTS.index(effort) if effort in EFFORTS else len(EFFORTS), effort


def _row(head: Mapping[str, Any], name: str, effort: str, samples: Mapping[Key, Mapping[str, Any]]) -> dict[str, Any]:
    scores: dict[str, list[int]] = defaultdict(list)
    answers = {key: one for key, one in samples.items() if one["fate"] not in LOST}
    for key, one in answers.items():
        scores[key[2]].append(int(one["fate"] is Fate.RIGHT))
    fates = Counter(one["fate"] for one in samples.values())
    n, lost = len(samples), len(samples) - len(answers)
    mean, low, high = intervals.accuracy(list(scores.values()))
    usage = [one.get("usage", {}) for one in answers.values()]
    return {
        "eval": name,
        "effort": effort or None,
        "samples": n,
        "questions": len({key[2] for key in samples}),
        "lost": lost,
        "accuracy": mean if answers else None,
        "low": low,
        "high": high,
        "worst": fates[Fate.RIGHT] / n,
        "best": (fates[Fate.RIGHT] + lost) / n,
        "fates": {fate.value: fates[fate] for fate in Fate},
        "output_tokens": _spread([one.get("output", 0) for one in usage]),
        "reasoning_tokens": _spread([one.get("reasoning", 0) for one in usage]),
        "seconds": _spread([one.get("seconds", 0.0) for one in answers.values()]),
        "first_s": _spread([one["first_s"] for one in answers.values() if "first_s" in one]),
        "tries_again": sum(max(0, one.get("tries", 1) - 1) for one in samples.values()),
        "parts": _parts([one.get("parts", {}) for one in samples.values()]),
        "published": [
            {"percent": percent, "source": source} for percent, source in published(head.get("published"), name, effort)
        ],
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, 95th percentile and total."""
    if not values:
        return None
    ordered = sorted(values)
    middle, p95 = statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"mean": statistics.fmean(ordered), "median": middle, "p95": p95, "total": float(sum(ordered))}


def _parts(samples: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, dict[str, float]]:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for parts in samples:
        for name, (good, of) in parts.items():
            sums[name] = [sums[name][0] + good, sums[name][1] + of]
    found = {}
    for name, (good, of) in sums.items():
        if of:
            low, high = intervals.wilson(good, of)
            found[name] = {"good": float(good), "of": float(of), "low": low, "high": high}
    return found
