"""Ranks of the benchmark that fail or hang, and a machine without two GPUs. The sums themselves need GPUs."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from benchmarks import all_reduce

ENDS, FAILS, HANGS = ([sys.executable, "-c", code] for code in ("", "exit(1)", "import time; time.sleep(60)"))


@pytest.mark.parametrize(
    ("commands", "fine"),
    [([ENDS, ENDS], True), ([ENDS, FAILS], False), ([HANGS, FAILS], False), ([ENDS, HANGS], False)],
    ids=["both end", "one fails", "its peer hangs", "one hangs"],
)
def test_a_rank_does_not_wait_for_one_that_failed(commands: list[list[str]], fine: bool) -> None:
    begin = time.monotonic()
    assert all_reduce.together(commands, seconds=5) is fine
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(("count", "capability"), [(1, (9, 0)), (2, (8, 0))])
def test_no_process_starts_without_two_gpus_of_hopper(
    monkeypatch: pytest.MonkeyPatch, count: int, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(all_reduce, "together", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit, match="two sm90 GPUs"):
        all_reduce.main()
