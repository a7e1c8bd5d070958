"""Bounds the alternatives that are matched at once, each of which costs the engine time for every token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError

MAX_WIDTH = 30.0
"""Milliseconds that a token may take at worst, by the figures below, measured on one core of a 2-core Xeon. It is the
engine's own thread that waits."""

CHAINS, STATES, CONTAINER = 9.0, 0.25, 0.05
"""Cost of one more string counted in blocks, other string, and array or object."""

Matched = Mapping[str, float]
"""Rules that may be matched at once and what each adds. The same rule in two alternatives is matched once."""


class Widths:
    """By rule: what is matched at once inside its values."""

    def __init__(self) -> None:
        self._places: dict[
            str, Mapping[str, Matched]
        ] = {}  # of an alternative, by "string", "array", or ":" and a name
        self._widest: dict[str, Matched] = {}

    def string(self, rule: str, weight: float) -> None:
        self._places[rule] = {"string": {rule: weight}}

    def array(self, rule: str, entries: Iterable[str]) -> None:
        inside = max((self._widest.get(entry, {}) for entry in entries), key=_sum, default={})
        self._places[rule] = {"array": {rule: CONTAINER, **inside}}

    def object(self, rule: str, members: Iterable[tuple[str, str]], others: Iterable[str]) -> None:
        """`members` are names and the rules of their values, `others` those of further values."""
        places = {f":{name}": {rule: CONTAINER, **self._widest.get(value, {})} for name, value in members}
        rest = {rule: CONTAINER}
        for value in others:
            rest |= self._widest.get(value, {})
        self._places[rule] = {":": rest, **places}

    def value(self, rule: str, alternatives: Iterable[str]) -> None:
        """A value is one of `alternatives`; in an object's members, those of other objects under the same name are too.

        Raises:
            NotEnforceableError: too much could be matched at once.
        """
        places: dict[str, Matched] = {}
        for alternative in alternatives:
            for place, matched in self._places.get(alternative, {}).items():
                places[place] = {**places.get(place, {}), **matched}
        rest = places.get(":", {})
        widest = max((({**rest, **m} if p[0] == ":" else m) for p, m in places.items()), key=_sum, default={})
        if _sum(widest) > MAX_WIDTH:
            raise NotEnforceableError("anyOf", "has too many alternatives that begin alike: give them a constant first")
        self._widest[rule] = widest


def _sum(matched: Matched) -> float:
    return sum(matched.values())
