"""A benchmark's report of a server that did not start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import served
from benchmarks.served import ServedError


def test_the_cause_far_above_the_end_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    above = ["WARNING: errors like `OSError: too many open files`", "(pid=1) ValueError: too little memory"]
    log.write_text("\n".join([*above, *map(str, range(60)), "RuntimeError: see above"]))
    told = served.tail(log).splitlines()
    assert told[:2] == ["(pid=1) ValueError: too little memory", "..."]
    assert told[-2:] == ["59", "RuntimeError: see above"]
    assert len(told) == 32


def test_a_short_log_is_told_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: no\nend")
    assert served.tail(log) == "ValueError: no\nend"


@pytest.mark.vllm
@pytest.mark.slow
def test_a_server_that_ends_is_an_error_with_what_it_said(tmp_path: Path) -> None:
    with (
        pytest.raises(ServedError, match="vllm serve ended with"),
        served.server(["--no-such-flag"], os.environ, tmp_path / "log"),
    ):
        pass
