"""Work is launched directly once, then from a graph; if the capture fails, always directly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gptoss.engine.runner import graphs
from vllm_gptoss.engine.runner.graphs import Graphs, Launches, Work


class Recorded:
    """A fake CUDA graph."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def replay(self) -> None:
        self.done.append("replayed")


class FakeGraphs(Graphs):
    """Counts captures instead of capturing, for launches that can be captured."""

    def __init__(self, done: list[str], fails: bool = False) -> None:
        self.works, self.done, self.fails = OrderedDict(), done, fails

    def capture(self, launch: Any) -> Any:
        self.done.append("captured")
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        return Recorded(self.done)


def launching(done: list[str], what: str = "launched", captures: bool = True) -> Callable[[], Launches]:
    return lambda: Launches(lambda: done.append(what), captures)


def test_the_first_run_compiles_and_the_second_captures() -> None:
    done: list[str] = []
    work, kept = Work(), FakeGraphs(done)
    for _ in range(3):
        work.run(kept, launching(done))
    assert done == ["launched", "captured", "replayed", "replayed"]


def test_what_must_not_be_captured_is_launched() -> None:
    done: list[str] = []
    work, kept = Work(), FakeGraphs(done)
    for _ in range(3):
        work.run(kept, launching(done, captures=False))
    assert done == ["launched"] * 3


class Kept(FakeGraphs):
    """Its graphs do again what was captured."""

    def capture(self, launch: Any) -> Any:
        return SimpleNamespace(replay=launch)


def test_what_is_launched_or_captured_is_of_the_step_that_runs() -> None:
    """Each batch launches with the sampling parameters of its requests. Once, the requests of the first batch ended,
    new requests took their rows, and the new requests' top-k was not applied."""
    done: list[str] = []
    launched, captured, kept = Work(), Work(), Kept(done)
    for batch in ("first", "second", "third"):
        launched.run(kept, launching(done, batch, captures=False))
    assert done == ["first", "second", "third"]
    done.clear()
    for batch in ("first", "second", "third"):
        captured.run(kept, launching(done, batch))
    assert done == ["first", "second", "second"]


def test_a_failed_capture_is_tried_once_and_said() -> None:
    done: list[str] = []
    work, kept = Work(), FakeGraphs(done, fails=True)
    for _ in range(4):
        work.run(kept, launching(done))
    assert done == ["launched", "captured", "launched", "launched", "launched"]


def test_the_least_recently_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "KEPT", 2)
    waited: list[bool] = []

    class Stream:
        def synchronize(self) -> None:
            waited.append(True)

    monkeypatch.setattr(graphs.torch.cuda, "current_stream", Stream)
    kept = FakeGraphs([])
    made = {name: kept.work(name) for name in "ab"}
    assert kept.work("a") is made["a"]
    kept.work("c")
    assert list(kept.works) == ["a", "c"]
    assert waited, "a graph that goes must not be running"
