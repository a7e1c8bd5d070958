"""JSON numbers between bounds, as EBNF over their digits. What has bounds is written without an exponent."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError

MAX_DIGITS = 30
"""Most digits of a bound before the point, and after it."""

INTEGER = '"-"? ( "0" | [1-9] [0-9]* )'
NUMBER = INTEGER + ' ( "." [0-9]+ )? ( [eE] [+-]? [0-9]+ )?'


@dataclass(frozen=True)
class Bound:
    """A limit, and whether it is itself excluded."""

    value: Decimal
    excluded: bool = False


def between(low: Bound | None, high: Bound | None, *, integer: bool) -> str | None:
    """The numbers from `low` to `high`; None if there are none."""
    for bound in (low, high):
        if bound is not None and max(bound.value.adjusted(), -int(bound.value.as_tuple().exponent)) >= MAX_DIGITS:
            raise NotEnforceableError("minimum" if bound is low else "maximum", f"has more than {MAX_DIGITS} digits")
    if low is None and high is None:
        return INTEGER if integer else NUMBER
    above = low if low is not None and low.value >= 0 else Bound(Decimal(0))
    found = []
    if high is None or high.value >= 0:
        found.append(_magnitude(above, high, integer))
    if low is None or low.value < 0:
        closest = Bound(Decimal(0), excluded=True)
        if high is not None and high.value < 0:
            closest = Bound(-high.value, high.excluded)
        magnitude = _magnitude(closest, Bound(-low.value, low.excluded) if low else None, integer)
        found.append(f'"-" ( {magnitude} )' if magnitude else None)
    return _any_of(found)


def _any_of(found: list[str | None]) -> str | None:
    parts = [part for part in found if part is not None]
    return " | ".join(f"( {part} )" for part in parts) if parts else None


def _magnitude(low: Bound, high: Bound | None, integer: bool) -> str | None:
    """Numbers that are not negative; `low` is neither."""
    if integer:
        first = int(low.value.to_integral_value("ROUND_CEILING"))
        first += low.excluded and first == low.value
        if high is None:
            return _whole(first, None)
        last = int(high.value.to_integral_value("ROUND_FLOOR"))
        last -= high.excluded and last == high.value
        return _whole(first, last) if first <= last else None
    first, first_digits = _split(low)
    if high is None:
        rest = f'( {_whole(first + 1, None)} ) ( "." [0-9]+ )?'
        return _any_of([f'"{first}" {_at_least(first_digits, low.excluded)}', rest])
    last, last_digits = _split(high)
    if first > last:
        return None
    if first == last:
        fraction = _within(first_digits, last_digits, low.excluded, high.excluded)
        return f'"{first}" {fraction}' if fraction is not None else None
    middle = _whole(first + 1, last - 1) if first + 1 <= last - 1 else None
    end = _at_most(last_digits, high.excluded)
    return _any_of(
        [
            f'"{first}" {_at_least(first_digits, low.excluded)}',
            f'( {middle} ) ( "." [0-9]+ )?' if middle else None,
            f'"{last}" {end}' if end is not None else None,
        ]
    )


def _split(bound: Bound) -> tuple[int, str]:
    """The whole part, and the digits after the point without zeros at their end."""
    whole, _, digits = f"{bound.value:f}".partition(".")
    return int(whole), digits.rstrip("0")


# Fractions: what follows the whole part, "" included where it may.


def _at_least(digits: str, excluded: bool) -> str:
    if not digits:
        return '"." [0-9]* [1-9] [0-9]*' if excluded else '( "." [0-9]+ )?'
    return f'"." ( {_from(digits, excluded)} )'


def _from(digits: str, excluded: bool) -> str:
    if not digits:
        return "[0-9]* [1-9] [0-9]*" if excluded else "[0-9]*"
    more = f"[{int(digits[0]) + 1}-9] [0-9]* | " if digits[0] < "9" else ""
    return f'{more}"{digits[0]}" ( {_from(digits[1:], excluded)} )'


def _at_most(digits: str, excluded: bool) -> str | None:
    if not digits:
        return None if excluded else '( "." "0"+ )?'
    return f'( "." ( {_to(digits, excluded)} ) )?'


def _to(digits: str, excluded: bool) -> str:
    """At least one digit, at most `digits`."""
    less = f"[0-{int(digits[0]) - 1}] [0-9]* | " if digits[0] > "0" else ""
    rest = digits[1:]
    equal = f"( {_to(rest, excluded)} )?" if rest else '"0"*'
    if not rest and excluded:
        return less.removesuffix(" | ")
    return f'{less}"{digits[0]}" {equal}'


def _within(low: str, high: str, low_excluded: bool, high_excluded: bool) -> str | None:
    if not low and not low_excluded:
        return _at_most(high, high_excluded)
    if low == high:
        if low_excluded or high_excluded:
            return None
        return f'"." "{low}" "0"*'
    if not high or low > high:
        return None
    return f'"." ( {_inside(low, high, low_excluded, high_excluded)} )'


def _inside(low: str, high: str, low_excluded: bool, high_excluded: bool) -> str:
    first, last = low[:1] or "0", high[0]
    if first == last:
        may_end = "?" if not low[1:] and not low_excluded else ""
        return f'"{first}" ( {_inside(low[1:], high[1:], low_excluded, high_excluded)} ){may_end}'
    middle = f"[{int(first) + 1}-{int(last) - 1}] [0-9]* | " if int(last) - int(first) > 1 else ""
    parts = f'"{first}" ( {_from(low[1:], low_excluded)} ) | {middle}'
    rest = high[1:]
    if rest:
        return f'{parts}"{last}" ( {_to(rest, high_excluded)} )?'
    return parts.removesuffix(" | ") if high_excluded else f'{parts}"{last}" "0"*'


# Whole numbers


def _whole(first: int, last: int | None) -> str:
    low = str(first)
    if last is None:
        same = _digits(low, "9" * len(low))
        return f"{same} | [1-9] {_free(len(low))} [0-9]*"
    high = str(last)
    if len(low) == len(high):
        return _digits(low, high)
    parts = [_digits(low, "9" * len(low))]
    parts += [f"[1-9] {_free(size - 1)}" for size in range(len(low) + 1, len(high))]
    parts.append(_digits("1" + "0" * (len(high) - 1), high))
    return " | ".join(parts)


def _free(count: int) -> str:
    return " ".join(["[0-9]"] * count)


def _digits(low: str, high: str) -> str:
    """Numbers of one length; no number but 0 begins with 0, which the bounds see to."""
    if not low:
        return '""'
    if low[0] == high[0]:
        return f'"{low[0]}" ( {_digits(low[1:], high[1:])} )' if low[1:] else f'"{low[0]}"'
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return f"[{low[0]}-{high[0]}] {_free(len(low) - 1)}"
    size = len(low) - 1
    parts = [f'"{low[0]}" ( {_digits(low[1:], "9" * size)} )']
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}] {_free(size)}")
    parts.append(f'"{high[0]}" ( {_digits("0" * size, high[1:])} )')
    return " | ".join(parts)
