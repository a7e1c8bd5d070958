"""Work is launched once by itself, then from a graph; where that cannot be captured, by itself for good."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from vllm_gptoss.runner import graphs
from vllm_gptoss.runner.graphs import Graphs, Work


class Recorded:
    """What stands for a CUDA graph."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def replay(self) -> None:
        self.done.append("replayed")


class FakeGraphs(Graphs):
    """Captures nothing, as long as it is asked for what can be captured."""

    def __init__(self, done: list[str], fails: bool = False) -> None:
        self.works, self.done, self.fails = OrderedDict(), done, fails

    def capture(self, launch: Any) -> Any:
        self.done.append("captured")
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        return Recorded(self.done)


def test_the_first_run_compiles_and_the_second_captures() -> None:
    done: list[str] = []
    work, kept = Work(lambda: done.append("launched"), captures=True), FakeGraphs(done)
    for _ in range(3):
        work.run(kept)
    assert done == ["launched", "captured", "replayed", "replayed"]


def test_what_must_not_be_captured_is_launched() -> None:
    done: list[str] = []
    work, kept = Work(lambda: done.append("launched"), captures=False), FakeGraphs(done)
    for _ in range(3):
        work.run(kept)
    assert done == ["launched"] * 3


def test_a_failed_capture_is_tried_once_and_said() -> None:
    done: list[str] = []
    work, kept = Work(lambda: done.append("launched"), captures=True), FakeGraphs(done, fails=True)
    for _ in range(4):
        work.run(kept)
    assert done == ["launched", "captured", "launched", "launched", "launched"]


def test_the_least_recently_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "KEPT", 2)
    waited: list[bool] = []

    class Stream:
        def synchronize(self) -> None:
            waited.append(True)

    monkeypatch.setattr(graphs.torch.cuda, "current_stream", Stream)
    kept = FakeGraphs([])
    made = {name: kept.work(name, lambda: Work(lambda: None, True)) for name in "ab"}
    assert kept.work("a", lambda: Work(lambda: None, True)) is made["a"]
    kept.work("c", lambda: Work(lambda: None, True))
    assert list(kept.works) == ["a", "c"]
    assert waited, "a graph that goes must not be running"
