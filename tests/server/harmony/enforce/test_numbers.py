"""Numbers below, at and above each bound: the grammar accepts exactly those that the bounds allow."""

from __future__ import annotations

import itertools
import re
from decimal import Decimal

import pytest

from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError
from vllm_gptoss.server.harmony.enforce.numbers import MAX_DIGITS, Bound, between

BOUNDS = [None, *map(Decimal, ("-12", "-9.5", "-1", "-0.05", "0", "0.25", "0.3", "7", "99", "101.75"))]
STEPS = [Decimal(step) for step in ("-10", "-1", "-0.1", "-0.01", "0", "0.01", "0.1", "1", "10")]


def pattern(grammar: str | None) -> re.Pattern[str]:
    """The regular expression of a grammar without names."""
    parts = re.split(r'"([^"]*)"', (grammar or "[^\\s\\S]").replace(" ", ""))
    return re.compile("".join(f"(?:{re.escape(part)})" if at % 2 else part for at, part in enumerate(parts)))


@pytest.mark.parametrize("integer", [True, False])
@pytest.mark.parametrize(
    ("low_excluded", "high_excluded"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_a_number_is_accepted_exactly_within_its_bounds(low_excluded: bool, high_excluded: bool, integer: bool) -> None:
    for low, high in itertools.product(BOUNDS, BOUNDS):
        least = None if low is None else Bound(low, low_excluded)
        most = None if high is None else Bound(high, high_excluded)
        accepted = pattern(between(least, most, integer=integer))
        values = {bound + step for bound in (low, high, Decimal(0)) if bound is not None for step in STEPS}
        for value in values if not integer else {Decimal(int(value)) for value in values}:
            above = low is None or value > low or (value == low and not low_excluded)
            below = high is None or value < high or (value == high and not high_excluded)
            texts = [f"{value:f}"] if integer else [f"{value:f}", f"{value:.3f}", f"{value.normalize():f}"]
            for text in texts:
                assert bool(accepted.fullmatch(text)) is (above and below), (low, high, text)
            if value == 0 and not (above and below):
                assert not accepted.fullmatch("-0"), (low, high)


@pytest.mark.parametrize("digits", ["1{}", "0.{}1"])
def test_a_bound_has_at_most_so_many_digits(digits: str) -> None:
    assert between(Bound(Decimal(digits.format("0" * (MAX_DIGITS - 1 - ("." in digits))))), None, integer=False)
    with pytest.raises(NotEnforceableError, match=f"more than {MAX_DIGITS} digits"):
        between(Bound(Decimal(digits.format("0" * (MAX_DIGITS - ("." in digits))))), None, integer=False)
