"""The outcome of an answer, and why. The final answer is searched in the last `TAIL` characters, which bounds the time
for long texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Any

import jsonschema

from vllm_gptoss.cli.eval.questions import ExpectedCall, Question, QuestionTurn, number

TAIL = 8192


class Outcome(StrEnum):
    """The end of one sample. The first five are answers, which count in the accuracy; the others were lost."""

    RIGHT = "right"
    WRONG = "wrong"
    CUT = "cut"  # the server ended it at its token limit
    EMPTY = "empty"  # neither text nor a call
    UNPARSED = "unparsed"  # text without an answer of the expected kind
    REFUSED = "refused"  # a 4xx, also 429 after all tries
    FAILED = "failed"  # a 5xx, or an error that the server reported inside its answer
    TIMED_OUT = "timed_out"
    BROKEN = "broken"  # no connection, or a stream without its end or of another form


LOST = frozenset({Outcome.REFUSED, Outcome.FAILED, Outcome.TIMED_OUT, Outcome.BROKEN})
"""No answer came: the next run sends the sample again; it is never scored as wrong."""

Verdict = tuple[Outcome, str]  # and why it is not right
RIGHT: Verdict = (Outcome.RIGHT, "")


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call as the server reported it, without an id if the server runs it; `arguments` is the text, JSON or not."""

    id: str
    name: str
    arguments: str

    def values(self) -> Any:
        """The arguments. Raises ValueError or RecursionError where they are no JSON."""
        return json.loads(self.arguments or "{}")


@dataclass(slots=True)
class Answer:
    """A whole answer, of one request or of all requests of a turn. cut: ended by the token limit. tokens: written ones,
    reasoning included; 0 where the server does not report them. items: the answer as the next request repeats it.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[FunctionCall] = field(default_factory=list)
    cut: bool = False
    tokens: int = 0
    items: Sequence[Mapping[str, Any]] = ()
    citations: int = 0


def judge(question: Question, turn: QuestionTurn, answer: Answer) -> Verdict:
    """The verdict over the answer to one turn of a question."""
    if answer.cut:
        return Outcome.CUT, "the token limit ended it"
    verdict = _calls(question, turn, answer)
    if verdict is not RIGHT:
        return verdict
    if not answer.text.strip():
        return RIGHT if turn.ends_with_calls or turn.equals == "" else (Outcome.EMPTY, "no text")
    if why := _leaked(turn, answer.text) or _mismatch(turn, answer):
        return Outcome.WRONG, why
    return _final(turn, answer.text)


_CONTROL = re.compile(r"<\|(?:start|end|message|channel|constrain|return|call|endoftext)\|>")
_HEADER = re.compile(r"\s*(?:assistant)?(?:analysis|commentary|final)(?=[A-Z{\[]|\s+to=|\s*json\b)")


def _leaked(turn: QuestionTurn, text: str) -> str:
    """Why an answer holds parts of the Harmony format, which a server has misread; else empty."""
    if found := _CONTROL.search(text[:TAIL]) or _CONTROL.search(text[-TAIL:]):
        return f"the control token {found[0]} is in the answer"
    if (found := _HEADER.match(text)) and not (turn.equals or "").startswith(found[0]):
        return f"the header {found[0].strip()!r} is in the answer"
    return ""


def _mismatch(turn: QuestionTurn, answer: Answer) -> str:
    lowered = answer.text.casefold()
    if turn.equals is not None and answer.text.strip() != turn.equals.strip():
        return "another text"
    if missing := [part for part in turn.says if part.casefold() not in lowered]:
        return f"does not contain {missing[0]!r}"
    if turn.reasons and not answer.reasoning.strip():
        return "no reasoning came with it"
    return f"{answer.citations} citations of {turn.citations}" if answer.citations < turn.citations else ""


def _final(turn: QuestionTurn, text: str) -> Verdict:
    """The verdict over the JSON, the letter or the number that a turn asks for."""
    if turn.schema is not None:
        try:
            why = misfit(json.loads(text), turn.schema)
        except (ValueError, RecursionError):
            return Outcome.UNPARSED, "no JSON"
        if why:
            return Outcome.WRONG, why
    expected = turn.number if turn.choice is None else turn.choice
    if expected is None:
        return RIGHT
    found = number_of(text) if turn.choice is None else choice_of(text, turn.among)
    if found is None:
        return Outcome.UNPARSED, "no number" if turn.choice is None else "no letter"
    return RIGHT if found == expected else (Outcome.WRONG, f"{found} instead of {expected}")


def misfit(value: Any, schema: Mapping[str, Any]) -> str:
    """Why a value does not fit a schema; empty where it does."""
    try:
        jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)
    except jsonschema.ValidationError as error:
        return f"{error.json_path}: {error.message}"[:200]
    except RecursionError:
        return "nested too deeply"
    return ""


_SAID_LETTER = re.compile(r"\b(?i:answer)(?:\s+(?i:is|option|choice))*[^\nA-Za-z]{0,12}([A-J])\b")
_BOXED_LETTER = re.compile(r"\\boxed\{(?:\\text(?:bf)?\{)?[\s(*]{0,4}([A-J])\b")
_ALONE = re.compile(r"(?:^|[\s(\[*_{])([A-J])(?=[\s)\]*_.}:]|$)")


def choice_of(text: str, among: str = "ABCD") -> str | None:
    """The letter of the option that a text ends on: the last "Answer: X", else the last box, else the only one alone on
    the last line."""
    tail = text[-TAIL:].rstrip()
    for pattern in (_SAID_LETTER, _BOXED_LETTER):
        if found := [letter for letter in pattern.findall(tail) if letter in among]:
            return str(found[-1])
    letters = {letter for letter in _ALONE.findall(tail.rpartition("\n")[2]) if letter in among}
    return letters.pop() if len(letters) == 1 else None


_NUMBER = r"[+-]?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?"
_SAID_NUMBER = re.compile(rf"\banswer\b[^\n\d]{{0,24}}?({_NUMBER})", re.IGNORECASE)
_ANY_NUMBER = re.compile(_NUMBER)
_BOX = re.compile(r"(?:[^{}]|\{[^{}]*\})*")
_MARKUP = re.compile(r"\\[,;! ]|\\(?:text|mathrm)\{[^{}]*\}|[{}]")


def number_of(text: str) -> Fraction | None:
    """The number that a text ends on: in the last \\boxed{…}, else after the last "answer", else the last of all."""
    _, boxed, tail = text[-TAIL:].rpartition("\\boxed{")
    if boxed and (box := _BOX.match(tail)):
        found = _ANY_NUMBER.findall(_MARKUP.sub("", box[0]))
    else:
        found = _SAID_NUMBER.findall(tail) or _ANY_NUMBER.findall(tail)
    return number(found[-1].replace("$", "")) if found else None


def _calls(question: Question, turn: QuestionTurn, answer: Answer) -> Verdict:
    """Right, if every expected call was made, none besides, and all with arguments that fit the function's schema."""
    offered = {tool["name"]: tool["parameters"] for tool in question.tools if tool["type"] == "function"}
    missing, wrong = list(turn.calls), ""
    for call in answer.calls:
        if call.name not in offered:
            wrong = wrong or f"a call of {call.name!r}, which was not offered"
            continue
        try:
            arguments = call.values()
        except (ValueError, RecursionError):
            return Outcome.UNPARSED, f"the arguments of {call.name} are no JSON: {call.arguments[:100]!r}"
        why = misfit(arguments, offered[call.name])
        match = None if why else expected_call(missing, call.name, arguments)
        if match is not None:
            missing.remove(match)
        else:
            wrong = wrong or f"{call.name}: {why or f'not expected: {call.arguments[:150]}'}"
    if missing and not wrong:
        wrong = f"not called: {missing[0].name}({json.dumps(missing[0].arguments)})"
    return (Outcome.WRONG, wrong) if wrong else RIGHT


def expected_call(expected: Sequence[ExpectedCall], name: str, arguments: Any) -> ExpectedCall | None:
    """The first of this function with these arguments; a call may have further arguments that its schema allows."""
    return next((one for one in expected if one.name == name and _same(one.arguments, arguments)), None)


def _same(expected: Any, value: Any) -> bool:
    if isinstance(expected, Mapping):
        if set(expected) == {"one_of"}:
            return any(_same(one, value) for one in expected["one_of"])
        return isinstance(value, dict) and all(key in value and _same(one, value[key]) for key, one in expected.items())
    if isinstance(expected, list):
        fits = isinstance(value, list) and len(value) == len(expected)
        return fits and all(_same(*pair) for pair in zip(expected, value, strict=True))
    if isinstance(expected, str):
        return isinstance(value, str) and value.strip().casefold() == expected.strip().casefold()
    return isinstance(value, bool) == isinstance(expected, bool) and bool(value == expected)
