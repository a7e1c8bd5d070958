"""Two runs over the same questions: what differs, which questions flipped, and whether it is more than chance."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from vllm_gptoss.cli.eval import intervals, record
from vllm_gptoss.cli.eval.apis import LOST, Fate
from vllm_gptoss.cli.eval.summary import rank

MAX_FLIPS = 1000
"""Flipped questions that are listed of one eval and effort."""


class CompareError(ValueError):
    """Two runs that cannot be compared; the message has the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class ComparedRow:
    """One eval at one effort. Accuracies and their difference are over the questions that both have answers to.

    `unpaired`: questions that only one run has; `lost`: those left out because a run lost all their samples.
    `flipped`: (question, mean score before, after), the worse first.
    """

    eval: str
    effort: str
    questions: int
    before: float
    after: float
    difference: intervals.Difference
    flipped: tuple[tuple[str, float, float], ...]
    worse: int
    better: int
    unpaired: int
    lost: int

    @property
    def verdict(self) -> str:
        """The interval's meaning in words."""
        if self.difference.high < 0:
            return "worse"
        if self.difference.low > 0:
            return "better"
        return f"no difference shown; a loss of {max(0.0, -100 * self.difference.low):.1f} points is not excluded"


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """All rows, and the settings in which the runs differ."""

    rows: tuple[ComparedRow, ...]
    settings: Mapping[str, tuple[Any, Any]]


EXPECTED = ("base_url", "published", *record.Recorder.FREE)
"""Settings that may differ without a word."""


def compare(before: Path, after: Path, seed: int = 0) -> Comparison:
    """Compares two folders.

    Raises:
        CompareError: they have no question in common, or not the same questions under the same names.
        RecordError: one is no run.
    """
    heads = [record.read_head(path) for path in (before, after)]
    plans = [head.get("evals", {}) for head in heads]
    for name in set(plans[0]) & set(plans[1]):
        if plans[0][name]["sha256"] != plans[1][name]["sha256"]:
            raise CompareError(f"{name} was read from different files: the runs did not get the same questions")
        if heads[0].get("seed") != heads[1].get("seed") and name == "gpqa":
            raise CompareError("the runs have different seeds: the options of GPQA were in another order")
    scores = [_scores(path) for path in (before, after)]
    groups = sorted(set(scores[0]) & set(scores[1]), key=lambda group: (group[0], rank(group[1])))
    rows = [_row(group, scores[0][group], scores[1][group], seed) for group in groups]
    if not any(row.questions for row in rows):
        raise CompareError(f"{before} and {after} have no answered question in common")
    differ = {
        key: (heads[0].get(key), heads[1].get(key))
        for key in sorted({*heads[0], *heads[1]} - {*EXPECTED, "evals"})
        if heads[0].get(key) != heads[1].get(key)
    }
    return Comparison(tuple(rows), differ)


Scores = dict[tuple[str, str], dict[str, list[int]]]


def _scores(folder: Path) -> Scores:
    """For each eval and effort, the questions with the scores of their answered repeats."""
    found: Scores = {}
    for (name, effort, question, _), one in record.kept(folder).items():
        scores = found.setdefault((name, effort), {}).setdefault(question, [])
        if one["fate"] not in LOST:
            scores.append(int(one["fate"] is Fate.RIGHT))
    return found


def _row(group: tuple[str, str], before: Mapping[str, Sequence[int]], after: Mapping[str, Sequence[int]],
         seed: int) -> ComparedRow:  # fmt: skip
    both = sorted(set(before) & set(after))
    pairs = {which: (fmean(before[which]), fmean(after[which])) for which in both if before[which] and after[which]}
    flips = sorted(
        ((which, one, two) for which, (one, two) in pairs.items() if abs(one - two) > 1e-9),
        key=lambda flip: (flip[2] - flip[1], flip[0]),
    )
    firsts, seconds = [pair[0] for pair in pairs.values()], [pair[1] for pair in pairs.values()]
    return ComparedRow(
        *group,
        questions=len(pairs),
        before=fmean(firsts) if firsts else 0.0,
        after=fmean(seconds) if seconds else 0.0,
        difference=intervals.paired(firsts, seconds, seed),
        flipped=tuple(flips[:MAX_FLIPS]),
        worse=sum(one > two for _, one, two in flips),
        better=sum(one < two for _, one, two in flips),
        unpaired=len(set(before) ^ set(after)),
        lost=len(both) - len(pairs),
    )
