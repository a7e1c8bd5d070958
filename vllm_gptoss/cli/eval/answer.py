"""What can become of a question, and what a server answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Fate(StrEnum):
    """The end of one sample. The first five are answers, which count in the accuracy; the others were lost."""

    RIGHT = "right"
    WRONG = "wrong"
    CUT = "cut"  # the server ended it at its token limit
    EMPTY = "empty"  # neither text nor a call
    UNPARSED = "unparsed"  # text without an answer of the expected kind
    REFUSED = "refused"  # a 4xx, or 429 until the tries were used up
    FAILED = "failed"  # a 5xx, or an error that the server reported inside its answer
    TIMED_OUT = "timed_out"
    BROKEN = "broken"  # no connection, a stream without its end, no JSON, or more bytes than allowed


LOST = frozenset({Fate.REFUSED, Fate.FAILED, Fate.TIMED_OUT, Fate.BROKEN})
"""No answer came: the next run sends it again; it is never scored as wrong."""


class LostError(Exception):
    """No answer came. again: a retry may succeed; wait_s: the server's Retry-After."""

    def __init__(self, fate: Fate, detail: str, *, again: bool, wait_s: float | None = None) -> None:
        super().__init__(detail)
        self.fate = fate
        self.detail = detail
        self.again = again
        self.wait_s = wait_s
        self.tries = 1


@dataclass(frozen=True, slots=True)
class Call:
    """A function call as the server reported it; `arguments` is the text, JSON or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens; 0 where the server does not report them."""

    input: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.input + other.input, self.output + other.output, self.reasoning + other.reasoning)


@dataclass(slots=True)
class Answer:
    """One whole answer, of one request.

    `items` is what the next request of the same dialogue repeats, in the form of the API. `cut`: by the token limit.
    """

    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    cut: bool = False
    usage: Usage = Usage()
    citations: int = 0
    items: tuple[Mapping[str, Any], ...] = ()
    tries: int = 1
    seconds: float = 0.0
    first_s: float | None = None


@dataclass(slots=True)
class Said:
    """What came of one turn of a question: the calls in the order of the requests that made them, and the last text."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[int, Call]] = field(default_factory=list)  # (number of the request in its turn, call)
    cut: bool = False
    citations: int = 0
