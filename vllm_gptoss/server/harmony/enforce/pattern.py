"""A JSON schema's `pattern` as an automaton: ECMA-262's regular expressions, found anywhere unless anchored.

Not covered: look-around, back references, word boundaries, `\\p{…}` and flags.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm_gptoss.server.harmony.enforce.automaton import ALL, Automaton, Range, build, cut
from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError

MAX_LENGTH, MAX_DEPTH, MAX_NODES = 1_000, 40, 3_000
"""Characters of a pattern, nested groups, and nodes once its counts are written out."""

_DIGIT: tuple[Range, ...] = ((0x30, 0x39),)
_WORD: tuple[Range, ...] = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: tuple[Range, ...] = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_NEWLINE: tuple[Range, ...] = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_NAMED = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_SETS = {"d": _DIGIT, "w": _WORD, "s": _SPACE}


def invert(ranges: Sequence[Range]) -> tuple[Range, ...]:
    inside = {piece for piece in cut(ranges) if any(low <= piece[0] <= high for low, high in ranges)}
    return tuple(piece for piece in cut(ranges) if piece not in inside)


def _refuse(why: str) -> NotEnforceableError:
    return NotEnforceableError("pattern", why)


@dataclass
class _Nodes:
    """A nondeterministic automaton: characters, free moves, and moves that only hold at the string's begin or end."""

    characters: list[list[tuple[tuple[Range, ...], int]]] = field(default_factory=list)
    free: list[list[tuple[str, int]]] = field(default_factory=list)  # ("", "^" or "$", node)

    def new(self) -> int:
        if len(self.free) >= MAX_NODES:
            raise _refuse(f"has more than {MAX_NODES} parts once its counts are written out")
        self.characters.append([])
        self.free.append([])
        return len(self.free) - 1


class _Reader:
    """Reads a pattern once per use of a part, so that `(ab){3}` needs no copies of nodes."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0
        self.nodes = _Nodes()

    def read(self) -> tuple[int, int]:
        ends = self.alternatives()
        if self.at < len(self.text):
            raise _refuse(f"has a '{self.text[self.at]}' that nothing opens")
        return ends

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self) -> str:
        if self.at >= len(self.text):
            raise _refuse("ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def alternatives(self) -> tuple[int, int]:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _refuse(f"nests more than {MAX_DEPTH} groups")
        first, last = self.nodes.new(), self.nodes.new()
        while True:
            begin, end = self.sequence()
            self.nodes.free[first].append(("", begin))
            self.nodes.free[end].append(("", last))
            if self.peek() != "|":
                break
            self.at += 1
        self.depth -= 1
        return first, last

    def sequence(self) -> tuple[int, int]:
        first = last = self.nodes.new()
        while self.peek() not in ("", "|", ")"):
            begin, end = self.repeated()
            self.nodes.free[last].append(("", begin))
            last = end
        return first, last

    def repeated(self) -> tuple[int, int]:
        """An atom and its quantifier; the atom is read again for each repetition that the quantifier allows."""
        start = self.at
        ends = self.atom()
        after = self.at
        least, most = self.quantifier()
        if (least, most) == (1, 1):
            return ends
        stop = self.at
        if self.text[start] in "^$":
            raise _refuse("repeats an anchor")
        first = last = self.nodes.new()
        copies = max(least, 1 if most is None else most)
        for number in range(copies):
            self.at = start
            begin, end = ends if number == 0 else self.atom()
            assert self.at == after or number == 0
            self.nodes.free[last].append(("", begin))
            joined = self.nodes.new()
            self.nodes.free[end].append(("", joined))
            if number >= least:
                self.nodes.free[last].append(("", joined))
            if most is None and number == copies - 1:
                self.nodes.free[joined].append(("", begin))
            last = joined
        self.at = stop
        return first, last

    def quantifier(self) -> tuple[int, int | None]:
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self.peek())
        if bounds is not None:
            self.at += 1
        elif self.peek() == "{" and (found := self.counts()) is not None:
            bounds = found
        else:
            return 1, 1
        if self.peek() == "?":  # lazy: the same language
            self.at += 1
        if self.peek() in ("*", "+", "?"):
            raise _refuse("repeats a repetition")
        least, most = bounds
        return least, most

    def counts(self) -> tuple[int, int | None] | None:
        close = self.text.find("}", self.at)
        low, comma, high = self.text[self.at + 1 : close].partition(",")
        if close < 0 or not low.isdecimal() or (high and not high.isdecimal()) or len(low + high) > 8:
            return None
        self.at = close + 1
        least = int(low)
        most = int(high) if high else None if comma else least
        if most is not None and most < least:
            raise _refuse("counts from more to less")
        return least, most

    def atom(self) -> tuple[int, int]:
        character = self.take()
        if character == "(":
            return self.group()
        first, last = self.nodes.new(), self.nodes.new()
        if character in ("^", "$"):
            self.nodes.free[first].append((character, last))
        elif character in ("*", "+", "?"):
            raise _refuse(f"has a '{character}' with nothing to repeat")
        else:
            self.nodes.characters[first].append((self.set_of(character), last))
        return first, last

    def group(self) -> tuple[int, int]:
        if self.peek() == "?":
            self.at += 1
            kind = self.take()
            if kind == "<" and self.peek() not in ("=", "!"):
                close = self.text.find(">", self.at)
                if close < 0:
                    raise _refuse("has a group name without an end")
                self.at = close + 1
            elif kind != ":":
                raise _refuse("looks ahead or behind, or sets flags")
        ends = self.alternatives()
        if self.take() != ")":
            raise _refuse("has a group without an end")
        return ends

    def set_of(self, character: str) -> tuple[Range, ...]:
        if character == ".":
            return invert(_NEWLINE)
        if character == "[":
            return self.bracket()
        if character == "\\":
            return self.escape(in_bracket=False)
        return ((ord(character), ord(character)),)

    def bracket(self) -> tuple[Range, ...]:
        is_inverted = self.peek() == "^"
        self.at += is_inverted
        found: list[Range] = []
        while (character := self.take()) != "]":
            low = self.escape(in_bracket=True) if character == "\\" else ((ord(character), ord(character)),)
            is_range = self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", "")
            if is_range and _is_one(low):
                self.at += 1
                end = self.take()
                high = self.escape(in_bracket=True) if end == "\\" else ((ord(end), ord(end)),)
                if not _is_one(high) or high[0][0] < low[0][0]:
                    raise _refuse("has a range that goes backwards")
                found.append((low[0][0], high[0][0]))
            else:
                found += low
        return invert(found) if is_inverted else tuple(found)

    def escape(self, *, in_bracket: bool) -> tuple[Range, ...]:
        kind = self.take()
        if kind.lower() in _SETS:
            ranges = _SETS[kind.lower()]
            return ranges if kind.islower() else invert(ranges)
        if kind in ("b", "B") and not in_bracket:
            raise _refuse("has a word boundary")
        if kind in "pPk" or (kind.isdecimal() and kind != "0"):
            raise _refuse(f"uses \\{kind}")
        if kind in ("x", "u"):
            point = self.code(kind)
        elif kind == "c":
            point = ord(self.take()) % 32
        elif kind == "b":
            point = 8
        else:
            point = _NAMED.get(kind, ord(kind))
            if kind.isalpha() and kind not in _NAMED:
                raise _refuse(f"uses \\{kind}")
        return ((point, point),)

    def code(self, kind: str) -> int:
        if kind == "u" and self.peek() == "{":
            close = self.text.find("}", self.at)
            digits, self.at = self.text[self.at + 1 : close], close + 1
        else:
            size = 2 if kind == "x" else 4
            digits, self.at = self.text[self.at : self.at + size], self.at + size
        try:
            point = int(digits, 16)
        except ValueError:
            raise _refuse(f"has \\{kind} without a code") from None
        if not any(low <= point <= high for low, high in ALL):
            raise _refuse(f"names a surrogate or no character: \\{kind}{digits}")
        return point


def _is_one(ranges: Sequence[Range]) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


_Reached = tuple[bool, bool, frozenset[int]]
"""A state: whether the pattern was found, whether this is the start of the string, and the nodes reached so far."""


def automaton_of(pattern: str) -> Automaton:
    """Strings in which `pattern` is found.

    Raises:
        NotEnforceableError: `pattern` is not a regular expression, is not covered, or needs too large an automaton.
    """
    if len(pattern) > MAX_LENGTH:
        raise _refuse(f"is longer than {MAX_LENGTH} characters")
    reader = _Reader(pattern)
    first, accept = reader.read()
    nodes = reader.nodes
    pieces = cut(r for moves in nodes.characters for ranges, _ in moves for r in ranges)

    def reached(starts: Sequence[int], *, begins: bool, ends: bool) -> frozenset[int]:
        found, rest = set(starts), list(starts)
        while rest:
            for condition, to in nodes.free[rest.pop()]:
                is_open = condition == "" or (condition == "^" and begins) or (condition == "$" and ends)
                if is_open and to not in found:
                    found.add(to)
                    rest.append(to)
        return frozenset(found)

    matched: _Reached = (True, False, frozenset())

    def state(starts: Sequence[int], *, begins: bool) -> _Reached:
        found = reached([*starts, first], begins=begins, ends=False)
        return matched if accept in found else (False, begins, found)

    def moves(now: _Reached) -> Iterator[tuple[int, int, _Reached]]:
        for low, high in pieces:
            if now[0]:
                yield low, high, matched
                continue
            targets = [
                to
                for node in now[2]
                for ranges, to in nodes.characters[node]
                if any(begin <= low <= end for begin, end in ranges)
            ]
            yield low, high, state(targets, begins=False)

    def is_final(now: _Reached) -> bool:
        return now[0] or accept in reached(sorted(now[2]), begins=now[1], ends=True)

    return build(state([], begins=True), moves, is_final)
