"""Confidence intervals of an accuracy, and of the difference of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist, fmean
from typing import Any

LEVEL = 0.95


def wilson(right: float, n: float, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval of `right` of `n` (Wilson 1927); `n` may be an effective number and need not be whole."""
    if n <= 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + level / 2)
    p = right / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # The ends are exact at 0 and 1, and rounding must not put the rate outside them.
    return max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half))


def effective(scores: Sequence[Sequence[int]]) -> float:
    """How many independent samples the repeats of the questions are worth.

    scores: for each question its repeats, 0 or 1. Repeats of one question are alike, so n samples carry less
    information than n questions: n is divided by the design effect, the variance of the mean over clusters relative to
    that of independent samples (Kish 1965). Between the number of questions and that of samples.
    """
    n, questions = sum(map(len, scores)), len(scores)
    if questions < 2 or n == questions:
        return float(n)
    p = sum(map(sum, scores)) / n
    if p in (0, 1):
        return float(questions)
    variance = sum((sum(one) - p * len(one)) ** 2 for one in scores) * questions / (questions - 1) / (n * n)
    return min(float(n), max(float(questions), p * (1 - p) / variance)) if variance else float(n)


def accuracy(scores: Sequence[Sequence[int]]) -> tuple[float, float, float]:
    """(mean, low, high) over all repeats of all questions."""
    n = sum(map(len, scores))
    if not n:
        return 0.0, 0.0, 1.0
    p, worth = sum(map(sum, scores)) / n, effective(scores)
    return (p, *wilson(p * worth, worth))


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two runs over the same questions: the mean difference, its interval, and the sign test of the questions."""

    mean: float
    low: float
    high: float
    p: float


def paired(before: Sequence[float], after: Sequence[float], seed: int = 0, resamples: int = 10_000) -> Difference:
    """The bootstrap over questions of `after - before`, each a question's mean score, in the same order.

    Percentile interval of `resamples` means (Efron 1979), numpy's PCG64 with `seed`. `p` is the two-sided sign test
    over the questions that differ; with one repeat that is McNemar's exact test.
    """
    import numpy

    values = numpy.asarray(after, dtype=float) - numpy.asarray(before, dtype=float)
    kinds, counts = numpy.unique(values.round(9), return_counts=True)
    if not len(values):
        return Difference(0.0, -1.0, 1.0, 1.0)
    random: Any = numpy.random.default_rng(seed)
    # Drawing questions with replacement is drawing how often each distinct difference comes: as fast for 10,000.
    drawn = random.multinomial(len(values), counts / counts.sum(), size=resamples)
    means = drawn @ kinds / len(values)
    low, high = numpy.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    worse, better = int((values < -1e-9).sum()), int((values > 1e-9).sum())
    return Difference(fmean(values.tolist()), float(low), float(high), sign_test(worse, better))


def sign_test(worse: int, better: int) -> float:
    """Two-sided exact probability of a split at least as uneven, were both sides equally likely."""
    n, less = worse + better, min(worse, better)
    if n == 0:
        return 1.0
    tail: int = sum(math.comb(n, k) for k in range(less + 1))
    return min(1.0, float(Fraction(2 * tail, 2**n)))
