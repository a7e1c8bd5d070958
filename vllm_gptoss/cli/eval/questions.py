"""A question: its turns, and the right answers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True, slots=True)
class Expected:
    """A function call that has to be made, and what it answers. A value `{"one_of": […]}` allows several."""

    name: str
    arguments: Mapping[str, Any]
    result: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message and the checks of its answer; None: no check. `says`: the text contains each, in upper or lower
    case. `equals`: the text is this, except outer white space.
    `number`, `choice` (a letter of `among`): the answer. `schema`: the text is JSON that fits it. `reasons`: reasoning
    was written. `citations`: at least this many annotations. `calls`: these calls and no others, in any order.
    `ends_with_calls`: they are not answered, and no text is asked for.
    """

    user: str
    says: tuple[str, ...] = ()
    equals: str | None = None
    number: Fraction | None = None
    choice: str | None = None
    among: str = LETTERS
    schema: Mapping[str, Any] | None = None
    reasons: bool = False
    citations: int = 0
    calls: tuple[Expected, ...] = ()
    ends_with_calls: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """One sample of a set. `options` of a choice begin with the right one, and are shuffled for every repeat."""

    id: str
    turns: tuple[Turn, ...]
    instructions: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    options: tuple[str, ...] = ()
    request: Mapping[str, Any] = field(default_factory=dict)  # further fields of its requests

    def asked(self, seed: int, repeat: int) -> Question:
        """The question of this repeat: the same for the same seed, on every machine."""
        if not self.options:
            return self
        order = list(range(len(self.options)))
        random.Random(f"{seed}/{self.id}/{repeat}").shuffle(order)  # noqa: S311
        shown = "\n".join(f"({LETTERS[place]}) {self.options[which]}" for place, which in enumerate(order))
        last = LETTERS[len(order) - 1]
        text = f"{self.turns[0].user}\n\n{shown}\n\nEnd with one line: 'Answer: ' and the letter, A to {last}."
        turn = dataclasses.replace(
            self.turns[0], user=text, choice=LETTERS[order.index(0)], among=LETTERS[: len(order)]
        )
        return dataclasses.replace(self, turns=(turn,))


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """The questions of one eval; `digest` is the SHA-256 of the files that they came from."""

    name: str
    questions: tuple[Question, ...]
    digest: str
    repeats: int = 1
