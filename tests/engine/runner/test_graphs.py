"""Work is launched directly once, then from a graph; if the capture fails, always directly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


def launching(done: list[str], captures: bool = True) -> Callable[[], Launches]:
    return lambda: Launches(lambda: done.append("launched"), captures)


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


def test_a_failed_capture_is_tried_once_and_said() -> None:
    done: list[str] = []
    work, kept = Work(), FakeGraphs(done, fails=True)
    for _ in range(4):
        work.run(kept, launching(done))
    assert done == ["launched", "captured", "launched", "launched", "launched"]


def test_a_capture_waits_for_the_stream_and_ends_where_a_launch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open capture would refuse every later launch of the process."""
    done: list[str] = []
    graph = SimpleNamespace(capture_begin=lambda **_: done.append("begins"), capture_end=lambda: done.append("ends"))
    stream = SimpleNamespace(wait_stream=lambda other: done.append(f"waits for the {other} stream"))
    cuda = SimpleNamespace(
        CUDAGraph=lambda: graph, Stream=lambda device: stream, graph_pool_handle=lambda: None,
        current_stream=lambda: "serving", stream=lambda stream: nullcontext(),
    )  # fmt: skip
    monkeypatch.setattr(graphs.torch, "cuda", cuda)
    kept = Graphs(torch.device("cpu"))
    assert kept.capture(lambda: done.append("launched")) is graph
    with pytest.raises(ZeroDivisionError):
        kept.capture(lambda: 1 / 0)
    assert done == ["waits for the serving stream", "begins", "launched", "ends", *done[:2], "ends"]


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
