"""A question: its turns, and the right answers, as in `sets/`."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping
from dataclasses import field
from fractions import Fraction
from typing import Annotated, Any

import jsonschema
from pydantic import BeforeValidator, ConfigDict, StringConstraints
from pydantic.dataclasses import dataclass

LETTERS = "ABCDEFGHIJ"
MAX_NUMBER = 100
"""Characters of a number that is compared."""

_CONFIG = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


def number(text: str) -> Fraction | None:
    """`1,024`, `-3.50`, `7/2`; nothing where it is none, or too long to be one."""
    text = re.sub(r"[,\s_]", "", text).strip("$.")
    if len(text) > MAX_NUMBER or not re.fullmatch(r"[+-]?(\d+/\d+|\d+(\.\d*)?|\.\d+)", text, re.ASCII):
        return None
    try:
        return Fraction(text)
    except ZeroDivisionError:
        return None


def _number(value: Any) -> Fraction | None:
    found = None if value is None else number(str(value))
    if value is not None and found is None:
        raise ValueError(f"{value!r} is no number")
    return found


def checked_schema(schema: Any) -> Any:
    """The JSON schema. Raises ValueError where it is none."""
    try:
        jsonschema.Draft202012Validator.check_schema({} if schema is None else schema)
    except jsonschema.SchemaError as error:
        raise ValueError(error.message) from None
    return schema


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


@dataclass(frozen=True, config=_CONFIG)
class ExpectedCall:
    """A function call that has to be made, and what it answers. A value `{"one_of": […]}` allows several."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    result: str = ""


@dataclass(frozen=True, config=_CONFIG)
class QuestionTurn:
    """One user message and the checks of its answer; None: no check. `says`: the text contains each, in upper or lower
    case. `equals`: the text is this, except outer white space.
    `number`, `choice` (a letter of `among`): the answer. `schema`: the text is JSON that fits it. `reasons`: reasoning
    was written. `citations`: at least this many annotations. `calls`: these calls and no others, in any order.
    `ends_with_calls`: they are not answered, and no text is asked for.
    """

    user: Text
    says: Annotated[tuple[str, ...], BeforeValidator(lambda says: (says,) if isinstance(says, str) else says)] = ()
    equals: str | None = None
    number: Annotated[Fraction | None, BeforeValidator(_number)] = None
    choice: str | None = None
    among: str = LETTERS
    schema: Annotated[dict[str, Any] | None, BeforeValidator(checked_schema)] = None
    reasons: bool = False
    citations: int = 0
    calls: tuple[ExpectedCall, ...] = ()
    ends_with_calls: bool = False

    def expected(self) -> Mapping[str, Any]:
        """The checks that the turn has, for the record."""
        wanted = {
            "choice": self.choice, "number": None if self.number is None else str(self.number), "equals": self.equals,
            "says": list(self.says), "calls": [[call.name, call.arguments] for call in self.calls],
        }  # fmt: skip
        return {name: value for name, value in wanted.items() if value}


@dataclass(frozen=True, config=_CONFIG)
class Question:
    """One sample of a set. `options` of a choice begin with the right one, and are shuffled for every repeat."""

    id: Text
    turns: tuple[QuestionTurn, ...]
    instructions: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    options: tuple[str, ...] = ()
    request: dict[str, Any] = field(default_factory=dict)  # further fields of its requests

    def asked(self, seed: int, repeat: int) -> Question:
        """The question of this repeat: the same for the same seed, on every machine."""
        if not self.options:
            return self
        order = list(range(len(self.options)))
        random.Random(f"{seed}/{self.id}/{repeat}").shuffle(order)  # noqa: S311
        shown = "\n".join(f"({LETTERS[place]}) {self.options[which]}" for place, which in enumerate(order))
        among = LETTERS[: len(order)]
        text = f"{self.turns[0].user}\n\n{shown}\n\nEnd with one line: 'Answer: ' and the letter, A to {among[-1]}."
        turn = dataclasses.replace(self.turns[0], user=text, choice=LETTERS[order.index(0)], among=among)
        return dataclasses.replace(self, turns=(turn,))


@dataclass(frozen=True)
class QuestionSet:
    """The questions of one eval; `digest` is the SHA-256 of the files that they came from."""

    name: str
    questions: tuple[Question, ...]
    digest: str
    repeats: int = 1
