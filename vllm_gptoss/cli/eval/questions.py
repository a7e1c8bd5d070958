"""A question: its turns and their right answers, as in `sets/`."""

from __future__ import annotations

import dataclasses
import random
import re
from dataclasses import field
from fractions import Fraction
from typing import Annotated, Any

import jsonschema
from pydantic import BeforeValidator, ConfigDict, StringConstraints
from pydantic.dataclasses import dataclass

LETTERS = "ABCDEFGHIJ"


class EvalError(ValueError):
    """An error that the user can correct; the message has the remedy."""


_CONFIG = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


def number(text: str) -> Fraction | None:
    """`1,024`, `-3.50`, `7/2`; None where the text is no number, or longer than 100 characters."""
    text = re.sub(r"[,\s_]", "", text).strip("$.")
    if len(text) > 100 or not re.fullmatch(r"[+-]?(\d+/0*[1-9]\d*|\d+(\.\d*)?|\.\d+)", text, re.ASCII):
        return None
    return Fraction(text)


def _number(value: Any) -> Fraction | None:
    found = None if value is None else number(str(value))
    if value is not None and found is None:
        raise ValueError(f"{value!r} is no number")
    return found


def checked_schema(schema: Any) -> Any:
    """The JSON schema. Raises ValueError where it is invalid."""
    try:
        jsonschema.Draft202012Validator.check_schema({} if schema is None else schema)
    except jsonschema.SchemaError as error:
        raise ValueError(error.message) from None
    return schema


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


@dataclass(frozen=True, config=_CONFIG)
class ExpectedCall:
    """A function call that has to be made, and its result. An argument `{"one_of": […]}` allows several values."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    result: str = ""


@dataclass(frozen=True, config=_CONFIG)
class QuestionTurn:
    """One user message and the checks of its answer; None: no check. `says`: the text contains each, in any case.
    `equals`: the text is this, except outer white space. `number`, `choice` (a letter of `among`): the answer.
    `schema`: the text is JSON that fits it. `reasons`: there is reasoning. `citations`: at least this many annotations.
    `calls`: these calls and no others, in any order. `ends_with_calls`: they get no results, and no text is needed.
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


@dataclass(frozen=True, config=_CONFIG)
class Question:
    """One sample of a set. `options` of a choice begin with the right one, and are shuffled for every repeat.
    `request`: further fields of its requests.
    """

    id: Text
    turns: tuple[QuestionTurn, ...]
    instructions: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    options: tuple[str, ...] = ()
    request: dict[str, Any] = field(default_factory=dict)

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
