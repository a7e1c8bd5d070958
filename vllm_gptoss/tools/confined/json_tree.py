"""The size of a JSON document's tree, told before it is built: 15 MiB of `[],[]` would be 954 MiB.

Standard library only.
"""

from __future__ import annotations

import itertools
import re

MAX_NODES = 100_000
"""Values, keys and containers of one document. Each costs 50 to 100 bytes once parsed."""

MAX_DEPTH = 100

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NODES, _BRACKETS = b"[{,:", b"[]{}"
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in _BRACKETS)
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


_LOOK = 64 << 10


def may_exceed(data: bytes, nodes: int) -> bool:
    """Whether the tree can have more than so many nodes: marks in texts count too. Looks no further than it must."""
    marks = 0
    for at in range(0, len(data), _LOOK):
        part = data[at : at + _LOOK]
        marks += sum(map(part.count, (b",", b":", b"[", b"{")))
        if marks > nodes:
            return True
    return False


def json_problem(data: bytes, max_nodes: int = MAX_NODES) -> str | None:
    """Why the tree of this JSON must not be built, or None. Linear, and builds nothing; broken JSON passes."""
    if not may_exceed(data, MAX_DEPTH):
        return None
    structure = _STRING.sub(b"", data)
    if len(structure) - len(structure.translate(None, _NODES)) > max_nodes:
        return f"it has more than {max_nodes} values"
    depths = itertools.accumulate(map(_STEP.__getitem__, structure.translate(None, _NO_BRACKETS)))
    return f"it is nested more than {MAX_DEPTH} deep" if max(depths, default=0) > MAX_DEPTH else None
