"""Finite automata over the characters of a string, after JSON's escapes are decoded.

A pattern, a length and a set of names each define a language. A string must be in the intersection of all languages
that its schema defines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeVar

from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError

Range = tuple[int, int]
"""Code points from the first to the second, both included."""

ALL: tuple[Range, ...] = ((0, 0xD7FF), (0xE000, 0x10FFFF))
"""Every character; surrogates are none."""

MAX_STATES = 600
"""A string's automaton becomes as many grammar rules. `rules` bounds the cost to compile them separately."""


@dataclass(frozen=True)
class Automaton:
    """Deterministic and complete: `moves[state]` covers `ALL` in ascending ranges. State 0 is the start."""

    moves: tuple[tuple[tuple[int, int, int], ...], ...]  # per state: (first, last, next state)
    final: frozenset[int]

    def __contains__(self, text: str) -> bool:
        state = 0
        for character in text:
            point = ord(character)
            state = next((to for low, high, to in self.moves[state] if low <= point <= high), -1)
            if state < 0:
                return False
        return state in self.final

    def complement(self) -> Automaton:
        return Automaton(self.moves, frozenset(range(len(self.moves))) - self.final)

    def __and__(self, other: Automaton) -> Automaton:
        def move(pair: tuple[int, int]) -> Iterator[tuple[int, int, tuple[int, int]]]:
            yield from _overlay(self.moves[pair[0]], other.moves[pair[1]])

        return build((0, 0), move, lambda pair: pair[0] in self.final and pair[1] in other.final)

    def alive(self) -> frozenset[int]:
        """States from which an accepting one can be reached."""
        before: dict[int, set[int]] = {}
        for state, moves in enumerate(self.moves):
            for _, _, to in moves:
                before.setdefault(to, set()).add(state)
        found, rest = set(self.final), list(self.final)
        while rest:
            for state in before.get(rest.pop(), ()):
                if state not in found:
                    found.add(state)
                    rest.append(state)
        return frozenset(found)


def _overlay(
    first: Sequence[tuple[int, int, int]], second: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[int, int, tuple[int, int]]]:
    at, by = 0, 0
    while at < len(first) and by < len(second):
        low, high = max(first[at][0], second[by][0]), min(first[at][1], second[by][1])
        if low <= high:
            yield low, high, (first[at][2], second[by][2])
        if first[at][1] <= second[by][1]:
            at += 1
        else:
            by += 1


State = TypeVar("State", bound=Hashable)


def build(
    start: State,
    moves: Callable[[State], Iterable[tuple[int, int, State]]],
    is_final: Callable[[State], bool],
) -> Automaton:
    """Explores from `start`; `moves` must cover `ALL` in ascending ranges.

    Raises:
        NotEnforceableError: there are more than `MAX_STATES` states.
    """
    number: dict[State, int] = {start: 0}
    queue, table = deque([start]), []
    while queue:
        row: list[tuple[int, int, int]] = []
        for low, high, to in moves(queue.popleft()):
            if to not in number:
                number[to] = len(number)
                queue.append(to)
                if len(number) > MAX_STATES:
                    raise NotEnforceableError("pattern", f"needs an automaton of more than {MAX_STATES} states")
            if row and row[-1][2] == number[to] and row[-1][1] + 1 == low:
                row[-1] = (row[-1][0], high, row[-1][2])
            else:
                row.append((low, high, number[to]))
        table.append(tuple(row))
    return Automaton(tuple(table), frozenset(number[state] for state in number if is_final(state)))


def cut(borders: Iterable[Range]) -> list[Range]:
    """`ALL` cut so that every range given is a union of pieces."""
    points = sorted({edge for low, high in borders for edge in (low, high + 1)})
    pieces = []
    for low, high in ALL:
        edges = [low, *(point for point in points if low < point <= high), high + 1]
        pieces += [(first, last - 1) for first, last in pairwise(edges)]
    return pieces


def lengths(least: int, most: int | None) -> Automaton:
    """Strings of `least` to `most` characters."""
    top = least if most is None else most + 1

    def move(count: int) -> Iterator[tuple[int, int, int]]:
        for low, high in ALL:
            yield low, high, min(count + 1, top)

    return build(0, move, lambda count: least <= count and (most is None or count <= most))


def one_of(names: Iterable[str]) -> Automaton:
    """Exactly these strings."""
    words = frozenset(names)

    def move(prefix: str | None) -> Iterator[tuple[int, int, str | None]]:
        longer = {word[len(prefix)] for word in words if prefix is not None and len(word) > len(prefix)}
        following = {c for c in longer if any(word.startswith(f"{prefix}{c}") for word in words)}
        points = {ord(c) for c in following}
        for low, high in cut((point, point) for point in points):
            yield low, high, f"{prefix}{chr(low)}" if low == high and low in points else None

    start: str | None = ""
    return build(start, move, lambda prefix: prefix in words)


_NAME = ((0x30, 0x39), (0x5F, 0x5F), (0x61, 0x7A))  # characters of a name in <|…|>


@cache
def without_control_tokens() -> Automaton:
    """Strings in which no control token is spelled: `<|`, letters, digits or `_`, `|>`."""
    less, bar, more = (ord(c) for c in "<|>")

    def move(state: int) -> Iterator[tuple[int, int, int]]:
        for low, high in cut([(less, less), (bar, bar), (more, more), *_NAME]):
            is_name = any(first <= low <= last for first, last in _NAME)
            if state == 4:
                to = 4  # spelled
            elif low == less:
                to = 1
            elif state == 1:
                to = 2 if low == bar else 0
            elif state == 2:
                to = 2 if is_name else 3 if low == bar else 0
            else:
                to = 4 if state == 3 and low == more else 0
            yield low, high, to

    return build(0, move, lambda state: state != 4)


@cache
def anything() -> Automaton:
    return Automaton((tuple((low, high, 0) for low, high in ALL),), frozenset({0}))
