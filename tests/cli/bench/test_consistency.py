"""The consistency check: it must pass rounding, and fail kernels that read other weights than those loaded."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from vllm_gptoss.cli.bench.consistency import Completion, Load, is_consistent, summary
from vllm_gptoss.cli.main import app


def answer(*gaps: float) -> Completion:
    return Completion([1, 2], [3] * len(gaps), [-1.0 - gap for gap in gaps], [-1.0] * len(gaps))


def test_the_summary_is_over_all_tokens_of_all_answers() -> None:
    found = summary([answer(0.0, 0.1), answer(-0.5)])
    assert found == {"mean": pytest.approx(0.2), "median": pytest.approx(0.1), "max": pytest.approx(0.5)}


@pytest.mark.parametrize(
    ("row", "passes"),
    [
        ({"mean": 0.3}, True),
        ({"mean": 0.31}, False),
        ({"mean": float("nan")}, False),
        ({"mean": 0.0, "decode_float64_mean": 0.3, "prompt_float64_mean": 0.2}, True),
        ({"mean": 0.0, "decode_float64_mean": 1.0, "prompt_float64_mean": 1.0}, False),
        ({"mean": 0.0, "max": 9.0}, True),
    ],
)
def test_a_mean_above_the_limit_fails(row: dict[str, float], passes: bool) -> None:
    """Decode and prompts that agree on other weights than those loaded are far from float64."""
    assert is_consistent(row, 0.3) is passes


def test_every_variant_and_size_reads_the_same_prompts() -> None:
    load = Load((1, 8), 5, 2, 100)
    assert load.prompts(8) == load.prompts(8)
    assert {len(prompt) for prompt in load.prompts(8)} == {5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", ".", "--after", "reload,fly"], "unknown operations fly"),
        (["--url", "http://127.0.0.1:1", "--after", "reload"], "either --url"),
        (["--url", "http://127.0.0.1:1", "--model", "."], "either --url"),
        ([], "either --url"),
        (["--url", "http://127.0.0.1:1"], "gave no log-probabilities: ConnectError"),
    ],
)
def test_what_cannot_be_measured_is_an_error(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "consistency", *arguments], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert message in result.output
