"""A file that is read half is a score over other questions: every form is read whole, or refused by its place."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from vllm_gptoss.cli.eval.data import READERS, load
from vllm_gptoss.cli.eval.questions import EvalError

GPQA = (
    "Record ID,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3,Subdomain\n"
    'rec1,"Which, of these?\nTwo lines.",right,wrong 1,"wrong, 2",wrong 3,x\n'
    "rec2,Second?,yes,no,maybe,never,y\n"
)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_gpqa_is_read_as_it_is_published(tmp_path: Path) -> None:
    found = load("gpqa", [written(tmp_path, "gpqa.csv", "\ufeff" + GPQA)])
    assert [question.id for question in found.questions] == ["rec1", "rec2"]
    assert found.questions[0].options == ("right", "wrong 1", "wrong, 2", "wrong 3")
    assert found.questions[0].turns[0].user == "Which, of these?\nTwo lines."
    assert found.repeats == 8


def test_options_stand_in_every_order_and_the_letter_follows(tmp_path: Path) -> None:
    question = load("gpqa", [written(tmp_path, "gpqa.csv", GPQA)]).questions[0]
    letters: Counter[str | None] = Counter()
    for repeat in range(400):
        (turn,) = question.asked(0, repeat).turns
        assert f"({turn.choice}) right\n" in turn.user + "\n"
        assert turn.user.count("\n(") == 4
        letters[turn.choice] += 1
    # 400 draws of 4: 100 each, standard deviation 8.7; six of them
    assert set(letters) == set("ABCD")
    assert min(letters.values()) > 48
    assert question.asked(3, 5) == question.asked(3, 5)
    assert any(question.asked(0, n).turns != question.asked(1, n).turns for n in range(9))


def test_options_by_letter(tmp_path: Path) -> None:
    rows = [{"question": "?", "options": ["a", "b", "c", "d", "e"], "answer": "C"}]
    (question,) = load("gpqa", [written(tmp_path, "x.jsonl", json.dumps(rows[0]))]).questions
    assert question.options == ("c", "a", "b", "d", "e")


def test_aime_and_gsm8k_are_read_as_they_are_published(tmp_path: Path) -> None:
    one = written(tmp_path, "I.jsonl", '{"question": "a", "answer": "70"}\n\n{"problem": "b", "answer": 588}\n')
    two = written(tmp_path, "II.jsonl", '{"question": "c", "answer": "336^\\\\circ"}\n')
    found = load("aime25", [one, two])
    assert [question.turns[0].number for question in found.questions] == [70, 588, 336]
    assert "\\boxed{}" in found.questions[0].turns[0].user
    solution = {"question": "Apples?", "answer": "5 * 4 = <<5*4=20>>20\n#### 1,020"}
    (question,) = load("gsm8k", [written(tmp_path, "g.jsonl", json.dumps(solution))]).questions
    assert question.turns[0].number == Fraction(1020)


BAD = {
    "empty": ("gpqa", "a.csv", "", "no questions"),
    "no column": ("gpqa", "a.csv", "Question,Correct Answer\nx,y\n", "question 1: no Incorrect Answer 1"),
    "empty cell": ("gpqa", "a.csv", GPQA.replace("maybe", ""), "question 2: no Incorrect Answer 2"),
    "no letter": ("gpqa", "a.jsonl", '{"question": "?", "options": ["a", "b"], "answer": "C"}', "question 1: answer"),
    "no JSON": ("aime25", "a.jsonl", '{"question": "a", "answer": 1}\n{', "line 2: no JSON"),
    "no object": ("aime25", "a.jsonl", "[1]", "question 1: no object"),
    "no number": ("aime25", "a.jsonl", '{"question": "a", "answer": "many"}', "question 1: answer is no number"),
    "deep": ("aime25", "a.jsonl", "[" * 100_000, "line 1: no JSON"),
    "twice": (
        "aime25",
        "a.jsonl",
        '{"question": "a", "answer": 1}\n{"question": "a", "answer": 1}',
        "same|two questions",
    ),
    "no text": ("aime25", "a.jsonl", "\udce4", "utf-8"),
    "no list": ("smoke", "a.yaml", "questions: 3", "no list"),
    "no YAML": ("smoke", "a.yaml", "{", "expected"),
    "id: Field required": ("smoke", "a.yaml", "questions: [{user: a}]", "question 1: id: Field required"),
    "a field too many": ("smoke", "a.yaml", "questions: [{id: a, user: b, anser: c}]", "anser"),
    "a turn's field too many": ("smoke", "a.yaml", "questions: [{id: a, turns: [{user: b, anser: c}]}]", "anser"),
    "no question": ("smoke", "a.yaml", "questions: [a]", "question 1"),
    "no function": (
        "smoke",
        "a.yaml",
        "questions: [{id: 1, user: b, number: 1}, {id: a, user: b, tools: [f]}]",
        "question 2: no function 'f'",
    ),
    "no tool": ("smoke", "a.jsonl", '{"id": "a", "user": "b", "tools": [3]}', "no function 3"),
    "a bad function": (
        "smoke",
        "a.yaml",
        "{functions: {f: {parameters: {type: odd}}}, questions: [{id: a, tools: [f]}]}",
        "odd",
    ),
    "no schema": ("smoke", "a.yaml", "questions: [{id: a, user: b, schema: {type: thing}}]", "thing"),
    "no call": ("smoke", "a.yaml", "questions: [{id: a, user: b, calls: [f]}]", "calls.0: Input should be"),
    "number in words": ("smoke", "a.yaml", "questions: [{id: a, user: b, number: four}]", "'four' is no number"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_its_place(tmp_path: Path, name: str) -> None:
    of, file, text, words = BAD[name]
    path = tmp_path / file
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(EvalError, match=words) as error:
        load(of, [path])
    assert str(path) in str(error.value)


def test_what_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="No such file"):
        load("gpqa", [tmp_path / "none.csv"])
    with pytest.raises(EvalError, match="--data gpqa=FILE"):
        load("gpqa")
    with pytest.raises(EvalError, match="there are gpqa, aime25"):
        load("mmlu")


def test_a_limit_draws_the_same_questions_for_the_same_seed() -> None:
    some = load("smoke", limit=5, seed=1).questions
    assert some == load("smoke", limit=5, seed=1).questions
    assert some != load("smoke", limit=5, seed=2).questions
    assert len({one.id for one in some}) == 5
    assert len(load("smoke", limit=1000).questions) == len(load("smoke").questions)


@pytest.mark.parametrize("name", ["smoke", "toolcalls", "harmony", "citations"])
def test_every_bundled_question_checks_something(name: str) -> None:
    assert name in READERS
    for question in load(name).questions:
        for turn in question.turns:
            checks = (turn.says, turn.equals, turn.number, turn.schema, turn.calls, turn.reasons, turn.citations)
            assert any(checks), question.id
            offered = {tool["name"] for tool in question.tools if tool["type"] == "function" and tool["parameters"]}
            assert {call.name for call in turn.calls} <= offered
        assert all(tool == {"type": "web_search"} for tool in question.tools if tool["type"] != "function")


@pytest.mark.parametrize("count", [1, 11])
def test_options_without_a_letter_are_refused(tmp_path: Path, count: int) -> None:
    row = {"question": "?", "options": [str(n) for n in range(count)], "answer": "A"}
    with pytest.raises(EvalError, match="question 1: answer must be the letter of one of 2 to 10 options"):
        load("gpqa", [written(tmp_path, "x.jsonl", json.dumps(row))])


def test_a_field_that_is_null_is_not_there(tmp_path: Path) -> None:
    row = {"id": "1", "user": "?", "instructions": None, "tools": None, "number": 4}
    (question,) = load("smoke", [written(tmp_path, "x.jsonl", json.dumps(row))]).questions
    assert (question.instructions, question.tools, question.turns[0].number) == ("", (), 4)
