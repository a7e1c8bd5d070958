"""How far a run is: in a terminal and in a log, after a start from the middle too."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from vllm_gptoss.cli.eval.apis import Fate
from vllm_gptoss.cli.eval.runner import progress


def told(terminal: bool, there: int) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=150)
    with progress(40, there, console) as show:
        for number in range(40 - there):
            fate = (Fate.RIGHT, Fate.WRONG, Fate.TIMED_OUT, Fate.CUT)[number % 4]
            show(("[gpqa]", "high", f"q{number}", 0), fate)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())


@pytest.mark.parametrize("terminal", [True, False])
def test_it_ends_with_all_of_them_and_every_kind_counted(terminal: bool) -> None:
    last = [line for line in told(terminal, 0).splitlines() if line.strip()][-1]
    assert ("40/40" if terminal else "40 of 40") in last
    assert "10 right, 20 not, 10 lost" in last
    assert "[gpqa] high" in last
    assert "left" in last


@pytest.mark.parametrize("terminal", [True, False])
def test_it_goes_on_from_the_middle(terminal: bool) -> None:
    text = told(terminal, 20)
    assert "20 of 40 samples are there already" in text
    assert ("40/40" if terminal else "40 of 40: ") in text
    assert "5 right, 10 not, 5 lost" in text


def test_a_log_gets_a_line_a_tenth_and_not_one_a_sample() -> None:
    assert len(told(False, 0).splitlines()) == 10
