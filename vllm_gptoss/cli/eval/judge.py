"""The fate of an answer, and why. The final answer is searched in the last `TAIL` characters, which bounds the time for
long texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import jsonschema

from vllm_gptoss.cli.eval.apis import Fate, FunctionCall
from vllm_gptoss.cli.eval.questions import ExpectedCall, Question, QuestionTurn, number

TAIL = 8192


@dataclass(slots=True)
class Said:
    """What came of one turn of a question: the calls in the order of the requests that made them, and the last text."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[int, FunctionCall]] = field(default_factory=list)  # (number of the request in its turn, call)
    cut: bool = False
    citations: int = 0


@dataclass(slots=True)
class Judgement:
    """`found`: the answer that was read. `parts`: (good, of how many) of what a set counts besides."""

    fate: Fate
    why: str = ""
    found: str = ""
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)


def judge(question: Question, said: Sequence[Said]) -> Judgement:
    """The verdict over all turns; the first turn that is not right decides."""
    verdict = Judgement(Fate.RIGHT)
    for turn, words in zip(question.turns, said, strict=False):
        one = _turn(question, turn, words)
        for name, (good, of) in one.parts.items():
            before = verdict.parts.get(name, (0, 0))
            verdict.parts[name] = (before[0] + good, before[1] + of)
        if verdict.fate is Fate.RIGHT:
            verdict.fate, verdict.why, verdict.found = one.fate, one.why, one.found
    return verdict


def _turn(question: Question, turn: QuestionTurn, said: Said) -> Judgement:
    verdict = _calls(question, turn, said)
    if said.cut:
        return Judgement(Fate.CUT, "the token limit ended it", parts=verdict.parts)
    if verdict.fate is not Fate.RIGHT:
        return verdict
    if not said.text.strip():
        empty = not turn.ends_with_calls and (turn.equals is None or turn.equals.strip() != "")
        return Judgement(Fate.EMPTY, "no text", parts=verdict.parts) if empty else verdict
    for check in (_leaked, _text, _answer, _schema):
        if (one := check(turn, said)) is not None:
            verdict.fate, verdict.why, verdict.found = one.fate, one.why, one.found
            if one.fate is not Fate.RIGHT:
                return verdict
    return verdict


_CONTROL = re.compile(r"<\|(?:start|end|message|channel|constrain|return|call|endoftext)\|>")
_HEADER = re.compile(r"\s*(?:assistant)?(?:analysis|commentary|final)(?=[A-Z{\[]|\s+to=|\s*json\b)")


def _leaked(turn: QuestionTurn, said: Said) -> Judgement | None:
    """Harmony's own words are no part of an answer: they are there where a server has misread it."""
    for text in (said.text[:TAIL], said.text[-TAIL:]):
        if found := _CONTROL.search(text):
            return Judgement(Fate.WRONG, f"the control token {found[0]} is in the answer")
    if (found := _HEADER.match(said.text)) and not (turn.equals or "").startswith(found[0]):
        return Judgement(Fate.WRONG, f"the header {found[0].strip()!r} is in the answer")
    return None


def _text(turn: QuestionTurn, said: Said) -> Judgement | None:
    if turn.equals is not None and said.text.strip() != turn.equals.strip():
        return Judgement(Fate.WRONG, "another text", said.text.strip()[:200])
    lowered = said.text.casefold()
    if missing := [part for part in turn.says if part.casefold() not in lowered]:
        return Judgement(Fate.WRONG, f"does not say {missing[0]!r}", said.text.strip()[:200])
    if turn.reasons and not said.reasoning.strip():
        return Judgement(Fate.WRONG, "no reasoning came with it")
    if said.citations < turn.citations:
        return Judgement(Fate.WRONG, f"{said.citations} citations of {turn.citations}")
    return None


def _answer(turn: QuestionTurn, said: Said) -> Judgement | None:
    if turn.choice is not None:
        letter = choice_of(said.text, turn.among)
        return _compared(letter, letter == turn.choice, "no letter")
    if turn.number is not None:
        value = number_of(said.text)
        return _compared(None if value is None else str(value), value == turn.number, "no number")
    return None


def _compared(found: str | None, right: bool, missing: str) -> Judgement:
    if found is None:
        return Judgement(Fate.UNPARSED, missing)
    return Judgement(Fate.RIGHT if right else Fate.WRONG, "" if right else "another answer", found)


def _schema(turn: QuestionTurn, said: Said) -> Judgement | None:
    if turn.schema is None:
        return None
    try:
        value = json.loads(said.text)
    except (ValueError, RecursionError):
        return Judgement(Fate.UNPARSED, "no JSON", said.text[:200])
    why = misfit(value, turn.schema)
    return Judgement(Fate.WRONG, why, said.text[:200]) if why else None


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
    tail = text[-TAIL:]
    for pattern in (_SAID_LETTER, _BOXED_LETTER):
        if found := [letter for letter in pattern.findall(tail) if letter in among]:
            return str(found[-1])
    lines = [line for line in tail.splitlines() if line.strip()]
    letters = {letter for letter in _ALONE.findall(lines[-1]) if letter in among} if lines else set()
    return letters.pop() if len(letters) == 1 else None


_NUMBER = r"[+-]?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?"
_SAID_NUMBER = re.compile(rf"\banswer\b[^\n\d]{{0,24}}?({_NUMBER})", re.IGNORECASE)
_ANY_NUMBER = re.compile(_NUMBER)


def number_of(text: str) -> Fraction | None:
    """The number that a text ends on: in the last box, else after the last "answer", else the last of all."""
    tail = text[-TAIL:]
    box = _box(tail)
    if box is not None:
        found = _ANY_NUMBER.findall(re.sub(r"\\[,;! ]|\\(?:text|mathrm)\{[^{}]*\}|[{}]", "", box))
        return number(found[-1]) if found else None
    for pattern in (_SAID_NUMBER, _ANY_NUMBER):
        if found := pattern.findall(tail):
            return number(found[-1].replace("$", ""))
    return None


def _box(text: str) -> str | None:
    """What is in the last \\boxed{…}, braces counted."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 7 : place]
    return text[start + 7 :]


def _calls(question: Question, turn: QuestionTurn, said: Said) -> Judgement:
    """Every expected call was made, none besides, all with arguments that fit the function's schema."""
    offered = {tool["name"]: tool["parameters"] for tool in question.tools if tool["type"] == "function"}
    if not offered and not said.calls:
        return Judgement(Fate.RIGHT)
    missing, wrong, unparsed = list(turn.calls), "", ""
    known = fits = 0
    for _, call in said.calls:
        if call.name not in offered:
            wrong = wrong or f"a call of {call.name!r}, which was not offered"
            continue
        known += 1
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            unparsed = unparsed or f"the arguments of {call.name} are no JSON: {call.arguments[:100]!r}"
            continue
        why = misfit(arguments, offered[call.name])
        fits += not why
        match = next((one for one in missing if not why and same_call(one, call.name, arguments)), None)
        if match is not None:
            missing.remove(match)
        else:
            wrong = wrong or (f"{call.name}: {why}" if why else f"not expected: {call.name}({call.arguments[:150]})")
    made, expected = len(said.calls), len(turn.calls)
    parts = {"offered function": (known, made), "schema-valid arguments": (fits, made)}
    if expected:
        parts["expected calls"] = (expected - len(missing), expected)
    if expected > 1:
        parts["in parallel"] = (int(_parallel(said.calls)), 1)
    if unparsed:
        return Judgement(Fate.UNPARSED, unparsed, parts=parts)
    if missing and not wrong:
        wrong = f"not called: {missing[0].name}({json.dumps(missing[0].arguments)})"
    return Judgement(Fate.WRONG if wrong else Fate.RIGHT, wrong, parts=parts)


def _parallel(calls: Sequence[tuple[int, FunctionCall]]) -> bool:
    """Whether one answer held several calls."""
    return len({request for request, _ in calls}) < len(calls)


def same_call(expected: ExpectedCall, name: str, arguments: Any) -> bool:
    """The function, and the expected arguments; further ones may be there where the schema has allowed them."""
    if name != expected.name or not isinstance(arguments, dict):
        return False
    return all(key in arguments and _same(value, arguments[key]) for key, value in expected.arguments.items())


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
    return (
        type(value) in (int, float, bool, type(None))
        and isinstance(value, bool) == isinstance(expected, bool)
        and bool(value == expected)
    )
