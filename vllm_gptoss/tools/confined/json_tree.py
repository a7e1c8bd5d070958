"""The size of a JSON document's tree, counted before it is built: 15 MiB of `[],[]` would be 954 MiB.

Standard library only.
"""

from __future__ import annotations

import itertools
import re

MAX_NODES = 100_000
"""Values, keys and containers of one document. Each costs 50 to 100 bytes once parsed."""

MAX_DEPTH = 100
MAX_DIGITS = 1000
"""Digits of one number: Python converts an integer in quadratic time, 8 MB of 4,300 digits each took 0.3 s."""

STEP = 64 << 10
"""Bytes that are counted in a few milliseconds for any content."""

_LONG = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
_AS_ZERO = bytes.maketrans(b"123456789", b"0" * 9)
_BRACKETS = b"[]{}"
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in _BRACKETS)
_DEEPER = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def may_exceed(data: bytes, nodes: int) -> bool:
    """Whether the tree can have more than `nodes` nodes; marks inside strings count too. Stops at the limit."""
    marks = 0
    for at in range(0, len(data), STEP):
        marks += _marks(data[at : at + STEP])
        if marks > nodes:
            return True
    return False


class Count:
    """The nodes and the depth of a document that comes in parts. Linear, and builds nothing; broken JSON passes.

    series: numbers after another value of a list that count as one node.
    """

    def __init__(self, max_nodes: int = MAX_NODES, max_depth: int = MAX_DEPTH, series: int = 1) -> None:
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._series = series
        self.nodes = self._quotes = self._depth = 0
        self._rest = self._tail = b""

    def add(self, part: bytes) -> str | None:
        """Why the tree must not be built, or None. `part` has at most `STEP` bytes on the event loop."""
        part, self._rest = self._rest + part, b""
        if b"\\" in part:
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
            if part.endswith(b"\\"):  # the next part begins with what it escapes
                part, self._rest = part[:-1], b"\\"
        pieces = part.split(b'"')
        structure = b" ".join(pieces[self._quotes % 2 :: 2])
        self._quotes += len(pieces) - 1
        numbers = structure.translate(_AS_ZERO, b" \t\r\n-").count(b",0") if self._series > 1 else 0
        self.nodes += _marks(structure) - numbers + numbers // self._series
        # No JSON has more strings than marks.
        if max(self.nodes, self._quotes // 2 - 1) > self._max_nodes:
            return f"it has more than {self._max_nodes} values"
        self._tail += structure  # a number may come in parts
        too_long, self._tail = _LONG.search(self._tail), self._tail[-MAX_DIGITS:]
        if too_long:
            return f"it has a number of more than {MAX_DIGITS} digits"
        brackets = structure.translate(None, _NO_BRACKETS)
        depths = itertools.accumulate(map(_DEEPER.__getitem__, brackets), initial=self._depth)
        deepest = max(depths)
        self._depth += sum(map(brackets.count, (b"[", b"{"))) * 2 - len(brackets)
        return f"it is nested more than {self._max_depth} deep" if deepest > self._max_depth else None


def _marks(data: bytes) -> int:
    return sum(map(data.count, (b",", b":", b"[", b"{")))


def nodes(data: bytes) -> int:
    """Marks of values in a small document, outside its texts."""
    count = Count(len(data))
    count.add(data)
    return count.nodes


def json_problem(data: bytes, max_nodes: int = MAX_NODES) -> str | None:
    """Why the tree of this JSON must not be built, or None."""
    count = Count(max_nodes)
    parts = (data[at : at + STEP] for at in range(0, len(data), STEP))
    return next(filter(None, map(count.add, parts)), None)
