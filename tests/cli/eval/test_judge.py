"""An answer that is misread is a wrong score: what counts as which answer, and which calls are the right ones."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest

from vllm_gptoss.cli.eval.judge import Answer, FunctionCall, Outcome, choice_of, judge, number_of
from vllm_gptoss.cli.eval.questions import ExpectedCall, Question, QuestionTurn


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: C", "C"),
        ("**Answer: B**", "B"),
        ("**Answer:** B", "B"),
        ("The answer is (D).", "D"),
        ("The correct answer is option A, because B is not.", "A"),
        ("Answer: A\nNo, wait.\nAnswer: B", "B"),
        ("$\\boxed{C}$", "C"),
        ("\\boxed{\\text{C}}", "C"),
        ("\\boxed{\\textbf{(D)}}", "D"),
        ("It follows.\n\n**(B)**", "B"),
        ("It follows.\nD.", "D"),
        ("B", "B"),
        ("Either A or B", None),
        ("the answer is a hard one", None),
        ("Answer: F", None),
        ("A long time ago the question was asked.\nI do not know.", None),
        ("", None),
    ],
)
def test_the_letter_is_the_one_that_was_meant(text: str, letter: str | None) -> None:
    assert choice_of(text) == letter


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\\boxed{204}", 204),
        ("\\boxed{42} and no, \\boxed{043}", 43),
        ("$$\\boxed{1{,}024}$$", 1024),
        ("\\boxed{\\$1,024.50}", Fraction("1024.5")),
        ("\\boxed{x = 7}", 7),
        ("\\boxed{\\text{none}} of 3", None),
        ("\\boxed{-5", -5),
        ("The answer is 12, not 13.", 12),
        ("So 3 + 4 = 7.", 7),
        ("#### 18", 18),
        ("7/2", Fraction(7, 2)),
        ("1/0", None),
        ("no number", None),
        ("9" * 500, None),
    ],
)
def test_the_number_is_the_one_that_was_meant(text: str, value: Fraction | int | None) -> None:
    assert number_of(text) == value


@pytest.mark.parametrize(
    "text", ["{" * 10**6, "\\boxed{" * 10**5, "Answer: " * 10**5, "answer " + " " * 10**6, "1," * 10**6]
)
def test_no_text_makes_it_slow(text: str) -> None:
    began = time.monotonic()
    choice_of(text)
    number_of(text)
    turn = QuestionTurn("?", number=1)
    judge(Question("q", (turn,)), turn, Answer(text))
    assert time.monotonic() - began < 10


def judged(turn: QuestionTurn, answer: Answer, **question: Any) -> tuple[Outcome, str]:
    return judge(Question("q", (turn,), **question), turn, answer)


CHECKS = [
    (QuestionTurn("?", number=Fraction(4)), Answer("4"), Outcome.RIGHT),
    (QuestionTurn("?", number=Fraction(4)), Answer("5"), Outcome.WRONG),
    (QuestionTurn("?", number=Fraction(4)), Answer("four"), Outcome.UNPARSED),
    (QuestionTurn("?", number=Fraction(4)), Answer(" \n"), Outcome.EMPTY),
    (QuestionTurn("?", number=Fraction(4)), Answer("4", cut=True), Outcome.CUT),
    (QuestionTurn("?", choice="B", among="ABCD"), Answer("Answer: B"), Outcome.RIGHT),
    (QuestionTurn("?", choice="B", among="ABCD"), Answer("Answer: C"), Outcome.WRONG),
    (QuestionTurn("?", says=("paris", "24")), Answer("PARIS has 24"), Outcome.RIGHT),
    (QuestionTurn("?", says=("paris", "24")), Answer("PARIS has 25"), Outcome.WRONG),
    (QuestionTurn("?", equals="first"), Answer("first\n"), Outcome.RIGHT),
    (QuestionTurn("?", equals="first"), Answer("First!"), Outcome.WRONG),
    (QuestionTurn("?", equals=""), Answer(""), Outcome.RIGHT),
    (QuestionTurn("?", reasons=True), Answer("a", reasoning="b"), Outcome.RIGHT),
    (QuestionTurn("?", reasons=True), Answer("a"), Outcome.WRONG),
    (QuestionTurn("?", citations=2), Answer("a", citations=1), Outcome.WRONG),
    (QuestionTurn("?", schema={"type": "object"}), Answer('{"a": 1}'), Outcome.RIGHT),
    (QuestionTurn("?", schema={"type": "object"}), Answer('{"a": 1'), Outcome.UNPARSED),
    (QuestionTurn("?", schema={"type": "object"}), Answer("[]"), Outcome.WRONG),
    (QuestionTurn("?", schema={"type": "array"}), Answer("[" * 100_000), Outcome.UNPARSED),
    (QuestionTurn("?"), Answer("<|channel|>final<|message|>Hi"), Outcome.WRONG),
    (QuestionTurn("?"), Answer("analysisThe user wants"), Outcome.WRONG),
    (QuestionTurn("?"), Answer("assistantfinalHi"), Outcome.WRONG),
    (QuestionTurn("?"), Answer("commentary to=functions.f {}"), Outcome.WRONG),
    (QuestionTurn("?"), Answer("Final answers are final; analysis: none, commentary: none. a <|b|> c"), Outcome.RIGHT),
    (QuestionTurn("?"), Answer("finally, commentary tool"), Outcome.RIGHT),
    (QuestionTurn("?"), Answer("hi", calls=[FunctionCall("1", "json", "{}")]), Outcome.WRONG),
]


@pytest.mark.parametrize(("turn", "said", "expected"), CHECKS, ids=range(len(CHECKS)))
def test_a_check_gives_its_outcome(turn: QuestionTurn, said: Answer, expected: Outcome) -> None:
    assert judged(turn, said)[0] is expected


CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TOOLS = (
    {"type": "function", "name": "weather", "parameters": CITY},
    {"type": "function", "name": "now", "parameters": {}},
)
ROME, OSLO = (
    ExpectedCall("weather", {"city": "Rome"}),
    ExpectedCall("weather", {"city": {"one_of": ["Oslo", "Oslo, Norway"]}}),
)


def calls(*made: tuple[str, str], text: str = "done") -> Answer:
    return Answer(text, calls=[FunctionCall(str(number), *one) for number, one in enumerate(made)])


CALLS = [
    ([ROME], calls(("weather", '{"city": "Rome"}')), Outcome.RIGHT, ""),
    ([ROME], calls(("weather", '{"city": " rome"}')), Outcome.RIGHT, ""),
    ([ROME], calls(("weather", '{"city": "Rome", "days": 1}')), Outcome.RIGHT, ""),
    ([ROME], calls(("weather", '{"city": "Rome", "days": "1"}')), Outcome.WRONG, "days"),
    ([ROME], calls(("weather", '{"city": "Rome", "extra": 1}')), Outcome.WRONG, "extra"),
    ([ROME], calls(("weather", '{"city": "Paris"}')), Outcome.WRONG, "not expected"),
    ([ROME], calls(("weather", '{"city": "Rome"')), Outcome.UNPARSED, "no JSON"),
    ([ROME], calls(("weather", '"Rome"')), Outcome.WRONG, "object"),
    ([ROME], calls(("json", '{"city": "Rome"}')), Outcome.WRONG, "not offered"),
    ([ROME], calls(), Outcome.WRONG, "not called"),
    ([ROME], calls(("weather", '{"city": "Rome"}'), ("weather", '{"city": "Rome"}')), Outcome.WRONG, "not expected"),
    ([ROME, OSLO], calls(("weather", '{"city": "Oslo, Norway"}'), ("weather", '{"city": "Rome"}')), Outcome.RIGHT, ""),
    ([ROME, OSLO], calls(("weather", '{"city": "Oslo"}')), Outcome.WRONG, "Rome"),
    ([ExpectedCall("now", {})], calls(("now", "")), Outcome.RIGHT, ""),
    ([], calls(("now", "{}")), Outcome.WRONG, "not expected"),
]


@pytest.mark.parametrize(("expected", "said", "wanted", "word"), CALLS, ids=range(len(CALLS)))
def test_calls_are_the_expected_ones_and_no_others(
    expected: list[ExpectedCall], said: Answer, wanted: Outcome, word: str
) -> None:
    found, why = judged(QuestionTurn("?", calls=tuple(expected)), said, tools=TOOLS)
    assert found is wanted
    assert word in why


def test_numbers_in_arguments_are_numbers_and_true_is_none() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    tools = ({"type": "function", "name": "f", "parameters": schema},)
    for value, right in (("1", True), ("1.0", True), ("true", False), ('"1"', False), ("null", False)):
        turn = QuestionTurn("?", calls=(ExpectedCall("f", {"a": 1}),))
        assert (judged(turn, calls(("f", f'{{"a": {value}}}')), tools=tools)[0] is Outcome.RIGHT) is right
