"""After any event between two steps, the model gets each request's last token, position and slot."""

from __future__ import annotations

import copy
import logging
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.engine.runner.host_engine import LIMIT, PARTS, PLAIN, SIZE, TOP_K, Engine, HostGraphs
from tests.support.vllm_log import heard, lines
from vllm_gptoss import fallback
from vllm_gptoss.engine.runner import batch, captured_steps, eligibility, model_runner
from vllm_gptoss.engine.runner.model_runner import GptOssModelRunner

pytestmark = pytest.mark.vllm


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Three requests of four tokens; ten steps of two of them have warmed up what steps replay."""
    random.seed(0)
    monkeypatch.setattr(captured_steps.vllm, "parts", lambda: PARTS)
    monkeypatch.setattr(captured_steps.vllm, "marks_padding", lambda: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(batch, "sampling", lambda *_: PLAIN)
    monkeypatch.setattr(model_runner, "Graphs", HostGraphs)
    made = Engine()
    made.leave_to_vllm("a", "b", "c", length=SIZE)
    for _ in range(10):
        made.decode("a", "b")
    return made


def between_vllms_step(engine: Engine) -> None:
    engine.leave_to_vllm("d")


def between_a_dummy_run(engine: Engine) -> None:
    assert engine.short_way.take(engine.step(["a", "b"]), True) is None
    engine.scramble()


def between_vllms_sampler(engine: Engine) -> None:
    engine.decode("a", "b", by_vllm=True)


def between_another_batch(engine: Engine) -> None:
    engine.decode("a", "b", "c")
    engine.decode("a", "c")


def between_another_way(engine: Engine) -> None:
    """As `tests/gpu/either_way.py` sends a step by vLLM."""
    engine.short_way.batch = None
    engine.scramble()


@pytest.mark.parametrize(
    "between",
    [between_vllms_step, between_a_dummy_run, between_vllms_sampler, between_another_batch, between_another_way],
)
def test_what_comes_between_changes_no_request(engine: Engine, between: Callable[[Engine], None]) -> None:
    """`Engine.decode` asserts it, here and below."""
    engine.decode("a", "b")
    between(engine)
    for _ in range(2 * SIZE):
        engine.decode("a", "b")


def test_requests_that_end_make_another_batch(engine: Engine) -> None:
    engine.decode("a", finished_req_ids={"b"})
    assert engine.short_way.batch.req_ids == ["a"]


def test_a_storm_of_aborts_and_a_preemption_leave_the_others_as_they_were(engine: Engine) -> None:
    """All but one are gone in the middle of a replayed batch; one comes back, its prompt read again by vLLM."""
    names = ["a", "b", "c", "d", "e", "f", "g"]
    engine.leave_to_vllm("d", "e", "f", "g")
    for _ in range(3):
        engine.decode(*names)
    engine.decode("b", finished_req_ids={"c", "d", "e", "f", "g"}, preempted_req_ids={"a"})
    for _ in range(2 * SIZE):
        engine.decode("b")
    engine.leave_to_vllm("a", length=engine.length["a"])
    for _ in range(2 * SIZE):
        engine.decode("b", "a")


def test_a_step_whose_model_fails_is_not_counted_on(engine: Engine) -> None:
    """vLLM stops the engine after a step raises. If an engine continues, its requests are as before that step."""
    manager = engine.short_way.runner.cudagraph_manager
    run, manager.run_fullgraph = manager.run_fullgraph, lambda descriptor: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.short_way.take(engine.step(["a", "b"]))
    manager.run_fullgraph = run
    engine.leave_to_vllm("d")
    for _ in range(2 * SIZE):
        engine.decode("a", "b")


def fails(*_: Any, **__: Any) -> Any:
    raise AttributeError("moved")


def reading_the_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligibility, "only_decodes", fails)


def choosing_a_graph(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.short_way.runner.cudagraph_manager.dispatch = fails


def making_the_batch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "begin", fails)


def setting_the_lengths(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.states.num_computed_prefill_tokens = np.zeros(1)


@pytest.mark.parametrize("broken", [reading_the_step, choosing_a_graph, making_the_batch, setting_the_lengths])
def test_a_failure_before_any_launch_leaves_the_step_to_vllm(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: Callable[[Engine, pytest.MonkeyPatch], None],
) -> None:
    """The same step, and all that follow; vLLM appends the step's blocks, so none may be there yet."""
    runner: Any = object.__new__(GptOssModelRunner)
    runner.short_way, by_vllm = engine.short_way, []
    monkeypatch.setattr(GPUModelRunner, "execute_model", lambda self, step: by_vllm.append(step) or "vLLM's")
    monkeypatch.setattr(fallback, "_said", set())
    engine.length |= dict.fromkeys(("a", "b", "c"), 4 * SIZE)
    broken(engine, monkeypatch)
    launched, held = list(engine.seen), copy.deepcopy(engine.runner.block_tables.held)
    steps = [engine.step(["a", "b", "c"]) for _ in range(2)]
    with heard(caplog, logging.WARNING):
        assert [runner.execute_model(step) for step in steps] == ["vLLM's"] * 2
    assert by_vllm == steps
    assert runner.taken is None
    assert (engine.seen, engine.runner.block_tables.held) == (launched, held)
    (line,) = lines(caplog)
    assert re.fullmatch(r"host: upstream from here on \((Attribute|Value)Error: .*\)", line)


def test_a_failure_after_vllms_states_have_the_step_is_raised(engine: Engine) -> None:
    """vLLM would append the step's blocks a second time."""
    engine.length |= dict.fromkeys(("a", "b"), 4 * SIZE)
    engine.short_way.buffers.add_blocks = engine.short_way.buffers.fill_blocks = fails
    with pytest.raises(AttributeError, match="moved"):
        engine.short_way.take(engine.step(["a", "b"]))


@pytest.mark.parametrize("fails", [False, True])
def test_where_a_graph_cannot_be_had_steps_are_launched(engine: Engine, fails: bool) -> None:
    graphs = engine.short_way.graphs
    graphs.fails = fails
    for _ in range(5):
        engine.decode("a", "b", "c")
    assert [graphs.works[key].graph is None for key in (("before", 3), ("after", 3, PLAIN))] == [fails, fails]


@pytest.mark.parametrize("seed", range(5))
def test_random_steps_are_as_plain_bookkeeping_says(engine: Engine, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng, names, steps = random.Random(seed), ["a", "b"], 0
    monkeypatch.setattr(batch, "sampling", lambda *_: rng.choice([PLAIN, PLAIN, TOP_K]))
    ended: set[str] = set()
    while steps < 400:
        event = rng.random()
        left = [name for name in names if engine.length[name] < LIMIT and rng.random() > 0.02]
        ended |= set(names) - set(left)
        names = left
        if not names or (event < 0.03 and len(names) + len(ended) < 4):
            engine.short_way.runner.finish_requests(SimpleNamespace(finished_req_ids=ended, preempted_req_ids=None))
            ended = set()
            engine.leave_to_vllm(f"of {steps}", length=rng.randrange(1, LIMIT - 10))
            names = [*names, f"of {steps}"]
        engine.decode(*names, by_vllm=0.03 < event < 0.08, finished_req_ids=ended)
        ended, steps = set(), steps + 1


@pytest.mark.parametrize("change", ["initialize_kv_cache", "capture_model", "shutdown", "reset_lora_state"])
def test_no_graph_outlives_what_it_knows(engine: Engine, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    runner: Any = object.__new__(GptOssModelRunner)
    runner.device = None
    runner.short_way, runner.taken = engine.short_way, engine.short_way.take(engine.step(["a", "b"]))
    before: list[bool] = []
    monkeypatch.setattr(GPUModelRunner, change, lambda *_, **__: before.append(runner.short_way is None), raising=False)
    getattr(runner, change)(**({"profile_only": True} if change == "capture_model" else {}))
    if change == "reset_lora_state":  # only the plugin's graphs depend on the logits' weights
        assert not runner.short_way.graphs.works
    else:
        assert before == [True], "dropped before vLLM's go"
        assert runner.short_way is runner.taken is None
