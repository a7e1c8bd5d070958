"""An answer that is misread is a wrong score: what counts as which answer, and which calls are the right ones."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest

from vllm_gptoss.cli.eval.apis import Fate, FunctionCall
from vllm_gptoss.cli.eval.judge import Said, choice_of, judge, number_of
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
    judge(Question("q", (QuestionTurn("?", number=Fraction(1)),)), [Said(text)])
    assert time.monotonic() - began < 10


def fate(turn: QuestionTurn, said: Said, **question: Any) -> tuple[Fate, str]:
    verdict = judge(Question("q", (turn,), **question), [said])
    return verdict.fate, verdict.why


CHECKS = [
    (QuestionTurn("?", number=Fraction(4)), Said("4"), Fate.RIGHT),
    (QuestionTurn("?", number=Fraction(4)), Said("5"), Fate.WRONG),
    (QuestionTurn("?", number=Fraction(4)), Said("four"), Fate.UNPARSED),
    (QuestionTurn("?", number=Fraction(4)), Said(" \n"), Fate.EMPTY),
    (QuestionTurn("?", number=Fraction(4)), Said("4", cut=True), Fate.CUT),
    (QuestionTurn("?", choice="B", among="ABCD"), Said("Answer: B"), Fate.RIGHT),
    (QuestionTurn("?", choice="B", among="ABCD"), Said("Answer: C"), Fate.WRONG),
    (QuestionTurn("?", says=("paris", "24")), Said("PARIS has 24"), Fate.RIGHT),
    (QuestionTurn("?", says=("paris", "24")), Said("PARIS has 25"), Fate.WRONG),
    (QuestionTurn("?", equals="first"), Said("first\n"), Fate.RIGHT),
    (QuestionTurn("?", equals="first"), Said("First!"), Fate.WRONG),
    (QuestionTurn("?", equals=""), Said(""), Fate.RIGHT),
    (QuestionTurn("?", reasons=True), Said("a", reasoning="b"), Fate.RIGHT),
    (QuestionTurn("?", reasons=True), Said("a"), Fate.WRONG),
    (QuestionTurn("?", citations=2), Said("a", citations=1), Fate.WRONG),
    (QuestionTurn("?", schema={"type": "object"}), Said('{"a": 1}'), Fate.RIGHT),
    (QuestionTurn("?", schema={"type": "object"}), Said('{"a": 1'), Fate.UNPARSED),
    (QuestionTurn("?", schema={"type": "object"}), Said("[]"), Fate.WRONG),
    (QuestionTurn("?", schema={"type": "array"}), Said("[" * 100_000), Fate.UNPARSED),
    (QuestionTurn("?"), Said("<|channel|>final<|message|>Hi"), Fate.WRONG),
    (QuestionTurn("?"), Said("analysisThe user wants"), Fate.WRONG),
    (QuestionTurn("?"), Said("assistantfinalHi"), Fate.WRONG),
    (QuestionTurn("?"), Said("commentary to=functions.f {}"), Fate.WRONG),
    (QuestionTurn("?"), Said("Final answers are final; analysis: none, commentary: none. a <|b|> c"), Fate.RIGHT),
    (QuestionTurn("?"), Said("finally, commentary tool"), Fate.RIGHT),
    (QuestionTurn("?"), Said("hi", calls=[(0, FunctionCall("1", "json", "{}"))]), Fate.WRONG),
]


@pytest.mark.parametrize(("turn", "said", "expected"), CHECKS, ids=range(len(CHECKS)))
def test_a_check_gives_its_fate(turn: QuestionTurn, said: Said, expected: Fate) -> None:
    assert fate(turn, said)[0] is expected


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


def calls(*made: tuple[str, str], text: str = "done") -> Said:
    return Said(text, calls=[(number, FunctionCall(str(number), *one)) for number, one in enumerate(made)])


CALLS = [
    ([ROME], calls(("weather", '{"city": "Rome"}')), Fate.RIGHT, ""),
    ([ROME], calls(("weather", '{"city": " rome"}')), Fate.RIGHT, ""),
    ([ROME], calls(("weather", '{"city": "Rome", "days": 1}')), Fate.RIGHT, ""),
    ([ROME], calls(("weather", '{"city": "Rome", "days": "1"}')), Fate.WRONG, "days"),
    ([ROME], calls(("weather", '{"city": "Rome", "extra": 1}')), Fate.WRONG, "extra"),
    ([ROME], calls(("weather", '{"city": "Paris"}')), Fate.WRONG, "not expected"),
    ([ROME], calls(("weather", '{"city": "Rome"')), Fate.UNPARSED, "no JSON"),
    ([ROME], calls(("weather", '"Rome"')), Fate.WRONG, "object"),
    ([ROME], calls(("json", '{"city": "Rome"}')), Fate.WRONG, "not offered"),
    ([ROME], calls(), Fate.WRONG, "not called"),
    ([ROME], calls(("weather", '{"city": "Rome"}'), ("weather", '{"city": "Rome"}')), Fate.WRONG, "not expected"),
    ([ROME, OSLO], calls(("weather", '{"city": "Oslo, Norway"}'), ("weather", '{"city": "Rome"}')), Fate.RIGHT, ""),
    ([ROME, OSLO], calls(("weather", '{"city": "Oslo"}')), Fate.WRONG, "Rome"),
    ([ExpectedCall("now", {})], calls(("now", "")), Fate.RIGHT, ""),
    ([], calls(("now", "{}")), Fate.WRONG, "not expected"),
]


@pytest.mark.parametrize(("expected", "said", "wanted", "word"), CALLS, ids=range(len(CALLS)))
def test_calls_are_the_expected_ones_and_no_others(
    expected: list[ExpectedCall], said: Said, wanted: Fate, word: str
) -> None:
    found, why = fate(QuestionTurn("?", calls=tuple(expected)), said, tools=TOOLS)
    assert found is wanted
    assert word in why


def test_numbers_in_arguments_are_numbers_and_true_is_none() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    tools = ({"type": "function", "name": "f", "parameters": schema},)
    for value, right in (("1", True), ("1.0", True), ("true", False), ('"1"', False), ("null", False)):
        turn = QuestionTurn("?", calls=(ExpectedCall("f", {"a": 1}),))
        assert (fate(turn, calls(("f", f'{{"a": {value}}}')), tools=tools)[0] is Fate.RIGHT) is right


def test_parts_count_functions_schemas_and_what_came_at_once() -> None:
    turn = QuestionTurn("?", calls=(ROME, OSLO))
    made = [("weather", '{"city": "Rome"}'), ("weather", '{"days": 1}'), ("storm", "{}")]
    said = Said("x", calls=[(at // 2, FunctionCall(str(at), *one)) for at, one in enumerate(made)])
    verdict = judge(Question("q", (turn,), tools=TOOLS), [said])
    assert verdict.parts == {
        "offered function": (2, 3), "schema-valid arguments": (1, 3), "expected calls": (1, 2), "in parallel": (1, 1),
    }  # fmt: skip


def test_the_first_turn_that_is_not_right_decides() -> None:
    question = Question(
        "q", (QuestionTurn("1", says=("a",)), QuestionTurn("2", says=("b",)), QuestionTurn("3", says=("c",)))
    )
    verdict = judge(question, [Said("a"), Said("x"), Said("")])
    assert (verdict.fate, verdict.why) == (Fate.WRONG, "does not say 'b'")
