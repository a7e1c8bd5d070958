"""The rules of one grammar as they are written, and what they may cost the engine."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError
from vllm_gptoss.server.harmony.enforce.width import Widths

MAX_BYTES = 200_000
"""Of one grammar: xgrammar reads it in the API server, 20 ms for as many bytes, and again in the engine."""

MAX_COST = 2_000
"""Estimated CPU milliseconds in which the engine compiles one grammar: xgrammar 0.2.8 looks at the whole vocabulary for
each state of a string. It does so in threads of its own and without Python's lock, so that no other request waits, and
keeps the states it has met. A wide state takes 22 ms on one core of a 2-core Xeon."""

_PRICES = (
    ((0x61, 0x7A), 2.5),
    ((0x41, 0x5A), 2.0),
    ((0x20, 0x20), 8.0),
    ((0x21, 0x7E), 2.0),
    ((0x80, 0x10FFFF), 8.0),
)
"""Milliseconds for a state that allows these characters, by how many tokens they begin: above what was measured for
each of 15 patterns (0.1 ms a state of digits, 2.4 of small letters, 7 with blanks, 22 of anything)."""


def price(ranges: Iterable[tuple[int, int]]) -> float:
    """Milliseconds to compile a state that goes on with the characters of `ranges`, which do not overlap."""
    return sum(
        weight * max(0, min(high, last) - max(low, first) + 1) / (last - first + 1)
        for low, high in ranges
        for (first, last), weight in _PRICES
    )


class Rules:
    """Rules by name, and what they cost: `cost` to compile, an estimate in milliseconds, and `widths` to match."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._shared: dict[str, str] = {}
        self._size = 0
        self._count = 0
        self.cost = 0.0
        self.widths = Widths()

    def new_name(self) -> str:
        self._count += 1
        return f"r{self._count}"

    def add(self, text: str, name: str | None = None, *, cost: float = 0.0) -> str:
        """Writes a rule, unless `name` exists already.

        Raises:
            NotEnforceableError: the grammar becomes larger or dearer than one may be.
        """
        name = name or self.new_name()
        if name in self._texts:
            return name
        self._size += len(text) + len(name) + 6
        self.cost += cost
        if self._size > MAX_BYTES:
            raise NotEnforceableError("schema", f"needs a grammar of more than {MAX_BYTES} bytes")
        if self.cost > MAX_COST:
            raise NotEnforceableError("schema", "has strings that take too long to compile: shorten patterns and names")
        self._texts[name] = text
        return name

    def shared(self, text: str) -> str:
        """The shared rule with this `text`."""
        if text not in self._shared:
            self._shared[text] = self.add(text)
        return self._shared[text]

    def __str__(self) -> str:
        return "".join(f"{name} ::= {text}\n" for name, text in self._texts.items())
