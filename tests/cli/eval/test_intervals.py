"""Intervals that are too narrow make chance look like a result: each is worked out here once more, another way."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from statistics import NormalDist, fmean

import pytest

from vllm_gptoss.cli.eval.intervals import accuracy, effective, paired, sign_test, wilson


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_is_that_of_the_literature(right: int, n: int, low: float, high: float) -> None:
    assert wilson(right, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("right", "n"), [(3, 10), (150, 198), (29, 30), (30, 30), (0, 7), (12.5, 41.3)])
def test_wilson_holds_the_rates_that_the_score_test_does_not_reject(right: float, n: float) -> None:
    """Its own definition: the ends are where (p - x)² n = z² x (1 - x)."""
    z = NormalDist().inv_cdf(0.975)
    for end in wilson(right, n):
        assert (right / n - end) ** 2 * n == pytest.approx(z * z * end * (1 - end), abs=1e-9)


def test_the_rate_is_inside_for_every_count() -> None:
    """A bar of the panel cannot be drawn otherwise; 60 of 60 once ended at 0.9999999999999999."""
    for n in range(1, 400):
        for right in {0, 1, n // 2, n - 1, n}:
            low, high = wilson(right, n)
            assert 0 <= low <= right / n <= high <= 1


def test_nothing_known_is_everything_possible() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert accuracy([]) == (0.0, 0.0, 1.0)


def test_one_repeat_is_plain_wilson() -> None:
    scores = [[1]] * 150 + [[0]] * 48
    assert accuracy(scores) == (150 / 198, *wilson(150, 198))


def test_repeats_that_always_agree_are_worth_one() -> None:
    scores = [[1] * 8] * 150 + [[0] * 8] * 48
    assert effective(scores) == pytest.approx(198)
    assert accuracy(scores)[1:] == pytest.approx(wilson(150, 198), abs=1e-6)
    assert effective([[1] * 4] * 30) == 30


def test_repeats_that_are_independent_are_worth_themselves() -> None:
    dice = random.Random(1)
    scores = [[int(dice.random() < 0.6) for _ in range(8)] for _ in range(2000)]
    assert effective(scores) == pytest.approx(16_000, rel=0.08)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """30 questions of different difficulty, 4 repeats: drawn 1,500 times, the mean over all such questions is inside in
    95 of 100. Plain Wilson over 120 samples would be in 80 or fewer; 1,500 draws of 95 % spread by 0.6 %."""
    dice = random.Random(7)
    inside = naive = 0
    for _ in range(1500):
        scores = []
        for _ in range(30):
            p = dice.choice([0.05, 0.3, 0.95, 0.99])
            scores.append([int(dice.random() < p) for _ in range(4)])
        truth = fmean([0.05, 0.3, 0.95, 0.99])
        _, low, high = accuracy(scores)
        inside += low <= truth <= high
        low, high = wilson(sum(map(sum, scores)), 120)
        naive += low <= truth <= high
    assert 0.93 <= inside / 1500 <= 0.985
    assert naive / 1500 < 0.85


def test_the_bootstrap_is_that_of_drawing_questions_one_by_one() -> None:
    dice = random.Random(3)
    before = [dice.choice([0, 0.25, 0.5, 1]) for _ in range(60)]
    after = [min(1, max(0, one + dice.choice([0, 0, 0, 0.25, -0.5]))) for one in before]
    found = paired(before, after)
    differences = [two - one for one, two in zip(before, after, strict=True)]
    means = sorted(fmean(dice.choices(differences, k=60)) for _ in range(20_000))
    assert found["mean"] == pytest.approx(fmean(differences))
    # Quantiles of 10,000 and 20,000 means, each mean a multiple of 1/240
    assert found["low"] == pytest.approx(means[500], abs=0.008)
    assert found["high"] == pytest.approx(means[19_499], abs=0.008)


def test_no_difference_is_none() -> None:
    same = [1.0, 0.0, 0.5] * 20
    found = paired(same, same)
    assert found == {"mean": 0, "low": 0, "high": 0, "p": 1}
    assert paired([], [])["low"] == -1


def test_a_known_loss_is_found_and_the_same_seed_says_the_same() -> None:
    before, after = [1.0] * 200, [0.0] * 20 + [1.0] * 180
    found = paired(before, after, seed=5)
    assert found["mean"] == pytest.approx(-0.1)
    assert -0.16 < found["low"] < -0.1 < found["high"] < -0.05
    assert found == paired(before, after, seed=5)


@pytest.mark.parametrize(("worse", "better"), [(0, 0), (5, 0), (0, 5), (7, 3), (3, 3), (40, 22)])
def test_the_sign_test_counts_coin_tosses(worse: int, better: int) -> None:
    n = worse + better
    tail = Fraction(sum(math.comb(n, k) for k in range(min(worse, better) + 1)), 2**n)
    assert sign_test(worse, better) == pytest.approx(float(min(Fraction(1), 2 * tail)))
