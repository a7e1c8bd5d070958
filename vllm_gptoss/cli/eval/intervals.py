"""Confidence intervals of an accuracy, and of the difference of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from statistics import NormalDist, fmean
from typing import Any

import numpy

Z = NormalDist().inv_cdf(0.975)  # of two-sided intervals of 95 %


def wilson(right: float, n: float) -> tuple[float, float]:
    """Wilson's score interval of `right` of `n` (Wilson 1927); `n` may be an effective number and need not be whole."""
    if n <= 0:
        return 0.0, 1.0
    p = right / n
    middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
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


def paired(before: Sequence[float], after: Sequence[float], seed: int = 0, resamples: int = 10_000) -> dict[str, float]:
    """`mean`, `low`, `high` and `p` of `after - before`, each a question's mean score, in the same order.

    Bootstrap over questions: percentile interval of `resamples` means (Efron 1979), numpy's PCG64 with `seed`. `p` is
    the two-sided sign test over the questions that differ; with one repeat that is McNemar's exact test.
    """
    values: Any = numpy.asarray(after, dtype=float) - numpy.asarray(before, dtype=float)
    if not len(values):
        return {"mean": 0.0, "low": -1.0, "high": 1.0, "p": 1.0}
    kinds, counts = numpy.unique(values.round(9), return_counts=True)
    # Drawing questions with replacement is drawing how often each distinct difference comes: as fast for 10,000.
    drawn: Any = numpy.random.default_rng(seed).multinomial(len(values), counts / counts.sum(), size=resamples)
    low, high = numpy.quantile(drawn @ kinds / len(values), [0.025, 0.975])
    worse, better = (int(counts[side].sum()) for side in (kinds < 0, kinds > 0))
    p = sign_test(worse, better)
    return {"mean": fmean(values.tolist()), "low": float(low), "high": float(high), "p": p}


def sign_test(worse: int, better: int) -> float:
    """Two-sided exact probability of a split at least as uneven, were both sides equally likely."""
    tail: int = sum(math.comb(worse + better, k) for k in range(min(worse, better) + 1))
    return min(1.0, float(Fraction(2 * tail, 2 ** (worse + better))))
