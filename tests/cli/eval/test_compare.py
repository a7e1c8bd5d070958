"""Two runs side by side: a loss that is there is found, chance is called chance, and only the same is compared."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vllm_gptoss.cli.eval.compare import compare
from vllm_gptoss.cli.eval.questions import EvalError
from vllm_gptoss.cli.main import app

HEAD = {"model": "m", "seed": 0, "efforts": ["low"], "temperature": 1.0, "date": "2026-01-01", "base_url": "a",
        "evals": {"gpqa": {"questions": 200, "repeats": 2, "sha256": "abc"}}}  # fmt: skip


def run(folder: Path, scores: dict[str, list[str]], **head: Any) -> Path:
    """A run's folder with the outcomes of each question's repeats."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({**HEAD, **head}))
    rows = [
        {
            "eval": "gpqa",
            "effort": "low",
            "id": which,
            "repeat": repeat,
            "outcome": outcome,
            "tokens": 1,
            "seconds": 1.0,
        }
        for which, outcomes in scores.items()
        for repeat, outcome in enumerate(outcomes)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def outcomes(right: int, of: int, first: int = 0) -> dict[str, list[str]]:
    return {f"q{n}": ["right" if first <= n < first + right else "wrong"] for n in range(of)}


def told(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["eval", "compare", *map(str, arguments)])


def test_a_real_loss_is_worse_and_its_questions_are_named(tmp_path: Path) -> None:
    before, after = run(tmp_path / "a", outcomes(150, 200)), run(tmp_path / "b", outcomes(120, 200))
    (row,) = compare(before, after)["rows"]
    figures = [row[name] for name in ("questions", "before", "after", "worse", "better", "verdict")]
    assert figures == [200, 0.75, 0.6, 30, 0, "worse"]
    assert {which for which, _, _ in row["flipped"]} == {f"q{n}" for n in range(120, 150)}
    done = told(before, after)
    assert done.exit_code == 0
    for words in ("-15.0", "worse", "q120 went from 100.0 to 0.0", "10 more questions differ"):
        assert words in done.output
    assert "better" in told(after, before).output


def test_chance_is_not_called_a_loss_and_what_it_could_hide_is_said(tmp_path: Path) -> None:
    dice = random.Random(4)
    runs = []
    for name in "ab":
        scores = {f"q{n}": ["right" if dice.random() < 0.7 else "wrong" for _ in range(2)] for n in range(200)}
        runs.append(run(tmp_path / name, scores))
    (row,) = compare(*runs)["rows"]
    assert row["difference"]["low"] < 0 < row["difference"]["high"]
    hidden = -100 * row["difference"]["low"]
    assert 1 < hidden < 12
    assert f"a loss of {hidden:.1f} points is not excluded" in told(*runs).output.replace("\n", " ")


@pytest.mark.parametrize(("limit", "code"), [("-20", 0), ("-12", 1), ("0", 1)])
def test_the_gate_looks_at_the_lower_end(tmp_path: Path, limit: str, code: int) -> None:
    """30 of 200 questions lost: -15 points, with an interval from about -20 (standard error 2.5)."""
    before, after = run(tmp_path / "a", outcomes(150, 200)), run(tmp_path / "b", outcomes(124, 200))
    done = told(before, after, "--fail-below", limit)
    assert done.exit_code == code, done.output
    assert ("below" in done.output) == bool(code)


def test_runs_that_are_the_same_pass_the_strictest_gate(tmp_path: Path) -> None:
    before, after = run(tmp_path / "a", outcomes(150, 200)), run(tmp_path / "b", outcomes(150, 200))
    assert told(before, after, "--fail-below", "0").exit_code == 0


def test_lost_and_missing_questions_are_left_out_and_counted(tmp_path: Path) -> None:
    first = {"q1": ["right"], "q2": ["right"], "q3": ["right"], "only": ["right"]}
    second = {"q1": ["right"], "q2": ["timed_out", "refused"], "q3": ["cut", "failed"]}
    (row,) = compare(run(tmp_path / "a", first), run(tmp_path / "b", second))["rows"]
    assert [row[name] for name in ("questions", "unpaired", "lost", "before", "after")] == [2, 1, 1, 1.0, 0.5]
    assert "left out: 1 questions of one run only, 1 that a run lost" in told(tmp_path / "a", tmp_path / "b").output


def test_the_last_line_of_a_sample_counts(tmp_path: Path) -> None:
    before, after = run(tmp_path / "a", {"q": ["right"]}), run(tmp_path / "b", {"q": ["failed"]})
    with (after / "samples.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {"eval": "gpqa", "effort": "low", "id": "q", "repeat": 0, "outcome": "right", "tokens": 1, "seconds": 1}
            )
            + "\n"
        )
    assert compare(before, after)["rows"][0]["after"] == 1


def test_settings_that_differ_are_told(tmp_path: Path) -> None:
    before = run(tmp_path / "a", outcomes(5, 9))
    after = run(tmp_path / "b", outcomes(5, 9), temperature=0.0, base_url="b", date="2026-01-02")
    assert compare(before, after)["settings"] == {"temperature": (1.0, 0.0)}
    assert "temperature: 1.0 before, 0.0 after" in told(before, after).output


def other(**changed: Any) -> dict[str, Any]:
    return {"evals": {"gpqa": {**HEAD["evals"]["gpqa"], **changed}}}


CANNOT = [
    (outcomes(5, 9), other(sha256="other"), "different files"),
    (outcomes(5, 9), {"seed": 1}, "different seeds"),
    ({"else": ["right"]}, {}, "no answered question in common"),
    ({"q1": ["failed"]}, {}, "no answered question in common"),
]


@pytest.mark.parametrize(("scores", "head", "words"), CANNOT, ids=range(len(CANNOT)))
def test_what_is_not_the_same_is_not_compared(tmp_path: Path, scores: Any, head: Any, words: str) -> None:
    before, after = run(tmp_path / "a", outcomes(5, 9)), run(tmp_path / "b", scores, **head)
    with pytest.raises(EvalError, match=words):
        compare(before, after)
    done = told(before, after)
    assert (done.exit_code, words in done.output) == (2, True)


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    run(tmp_path / "a", outcomes(5, 9))
    (tmp_path / "b").mkdir()
    with pytest.raises(EvalError, match="no run.json"):
        compare(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "run.json").write_text(json.dumps(HEAD))
    with pytest.raises(EvalError, match="No such file"):
        compare(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "samples.jsonl").write_text('{"outcome": "right"}\n[]\n3\n{"outcome": "odd"}\n\n')
    with pytest.raises(EvalError, match="in common"):
        compare(tmp_path / "a", tmp_path / "b")


def test_json_has_every_flip(tmp_path: Path) -> None:
    before, after = run(tmp_path / "a", outcomes(150, 200)), run(tmp_path / "b", outcomes(120, 200))
    found = json.loads(told(before, after, "--json").output)
    assert len(found["rows"][0]["flipped"]) == 30
    assert found["rows"][0]["difference"]["mean"] == pytest.approx(-0.15)
