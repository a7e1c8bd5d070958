"""The rules of one grammar, and the limits on their size and compile time."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError
from vllm_gptoss.server.harmony.enforce.width import Widths

MAX_BYTES = 200_000
"""Largest grammar. xgrammar parses it in the API server, which takes 20 ms at this size, and again in the engine."""

MAX_COST = 2_000
"""Largest estimate of the CPU milliseconds to compile one grammar. For each state of a string xgrammar 0.2.8 checks the
whole vocabulary. It compiles in its own threads without Python's lock, so other requests do not wait, and caches the
states. A wide state takes 22 ms on one core of a 2-core Xeon."""

_PRICES = (
    ((0x61, 0x7A), 2.5),
    ((0x41, 0x5A), 2.0),
    ((0x20, 0x20), 8.0),
    ((0x21, 0x7E), 2.0),
    ((0x80, 0x10FFFF), 8.0),
)
"""Milliseconds for a state that allows these characters; they grow with the number of tokens that begin with them. The
sums exceed the measured times of 15 patterns (0.1 ms a state of digits, 2.4 of small letters, 7 with blanks, 22 of
any characters)."""


def price(ranges: Iterable[tuple[int, int]]) -> float:
    """Milliseconds to compile a state that allows the characters of `ranges`, which do not overlap."""
    return sum(
        weight * max(0, min(high, last) - max(low, first) + 1) / (last - first + 1)
        for low, high in ranges
        for (first, last), weight in _PRICES
    )


class Rules:
    """Rules by name. `cost`: estimated milliseconds to compile them; `widths`: the cost to match them."""

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
            NotEnforceableError: the grammar exceeds `MAX_BYTES` or `MAX_COST`.
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
