"""Inputs that were prepared ahead serve exactly the next step of the same batch; all other steps prepare their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.runner.host_engine import LIMIT, PARTS, PLAIN, SIZE, TOP_K, Engine, HostGraphs
from vllm_gptoss import plugin
from vllm_gptoss.choose import ChoiceError
from vllm_gptoss.runner import batch, model_runner, work
from vllm_gptoss.runner.model_runner import GptOssModelRunner

pytestmark = pytest.mark.vllm


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """One request of six tokens, ten of whose steps have warmed up what steps replay."""
    random.seed(0)
    monkeypatch.setattr(work.vllm, "parts", lambda: PARTS)
    monkeypatch.setattr(work.vllm, "marks_padding", lambda: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(batch, "sampling", lambda *_: PLAIN)
    monkeypatch.setattr(model_runner, "Graphs", HostGraphs)
    made = Engine()
    made.leave_to_vllm("a", "b", "c", length=SIZE)
    for _ in range(10):
        made.decode("a", "b")
    return made


def test_a_step_like_the_last_finds_its_inputs(engine: Engine) -> None:
    assert [engine.decode("a", "b") for _ in range(8)] == [at % SIZE == 2 for at in range(8)], "blocks arrive at two"


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


def between_other_graphs(engine: Engine) -> None:
    engine.short_way.renew()
    engine.scramble()


def between_another_way(engine: Engine) -> None:
    """As `tests/gpu/either_way.py` sends a step by vLLM."""
    engine.short_way.batch = None
    engine.scramble()


@pytest.mark.parametrize(
    "between",
    [
        between_vllms_step,
        between_a_dummy_run,
        between_vllms_sampler,
        between_another_batch,
        between_other_graphs,
        between_another_way,
    ],
)
def test_what_comes_between_makes_it_prepare_again(engine: Engine, between: Callable[[Engine], None]) -> None:
    engine.decode("a", "b")
    assert engine.short_way.ready is engine.short_way.batch
    between(engine)
    assert engine.decode("a", "b")


def test_a_step_that_is_not_sampled_leaves_nothing_prepared(engine: Engine) -> None:
    engine.decode("a", "b")
    engine.short_way.take(engine.step(["a", "b"]))
    assert engine.short_way.ready is None


def test_requests_that_end_make_another_batch(engine: Engine) -> None:
    assert engine.decode("a", finished_req_ids={"b"})


def test_sampling_that_is_launched_prepares_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "sampling", lambda *_: TOP_K)
    assert all(engine.decode("a", "b", "c") for _ in range(5))


def test_a_failed_capture_prepares_nothing(engine: Engine) -> None:
    engine.short_way.graphs.fails = True
    assert all(engine.decode("a", "b", "c") for _ in range(5))


def test_what_no_graph_holds_keeps_sampling_from_none(engine: Engine) -> None:
    """Where the first graph failed, the second is captured without its launches."""
    graphs = engine.short_way.graphs
    graphs.work(("before", 3)).failed = True
    assert all(engine.decode("a", "b", "c") for _ in range(5))
    assert graphs.works["after", 3, PLAIN, False].graph is not None


def test_the_first_launch_does_and_says_no_more_than_its_part(engine: Engine) -> None:
    """It compiles; the second captures, and only what is captured prepares."""
    assert [engine.decode("a", "b", "c") for _ in range(2)] == [True, True]
    assert engine.short_way.ready is not None


def test_nothing_is_prepared_beyond_the_longest_request(engine: Engine) -> None:
    """A row of a block table ends with `max_model_len`: the tables here raise where one looks past it."""
    engine.leave_to_vllm("d", length=LIMIT - 6)
    ready = []
    for _ in range(6):
        engine.decode("a", "d")
        ready.append(engine.short_way.ready is not None)
    assert engine.length["d"] == LIMIT
    assert ready[-3:] == [True, True, False]
    with pytest.raises(IndexError):
        engine.short_way._prepare(engine.short_way.batch)


@pytest.mark.parametrize("seed", range(5))
def test_random_steps_find_the_inputs_that_they_should(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """`Engine.decode` asserts it."""
    rng, names, steps = random.Random(seed), ["a", "b"], 0
    monkeypatch.setattr(batch, "sampling", lambda *_: rng.choice([PLAIN, PLAIN, TOP_K]))
    ended: set[str] = set()
    while steps < 400:
        event = rng.random()
        left = [name for name in names if engine.length[name] < LIMIT and rng.random() > 0.02]
        ended |= set(names) - set(left)
        names = left
        if not names or (event < 0.03 and len(names) + len(ended) < 4):
            engine.short_way.runner.finish_requests(SimpleNamespace(finished_req_ids=ended))
            ended = set()
            engine.leave_to_vllm(f"of {steps}", length=rng.randrange(1, LIMIT - 10))
            names = [*names, f"of {steps}"]
        engine.decode(*names, by_vllm=0.03 < event < 0.08, finished_req_ids=ended)
        ended, steps = set(), steps + 1
    assert engine.prepared < 0.8 * steps, "hardly any step was prepared ahead"


def test_vllms_graph_is_looked_up_once_a_batch(engine: Engine) -> None:
    was, runs = engine.looked_up, len(engine.seen)
    for _ in range(5):
        engine.decode("a", "b", "c")
    assert (engine.looked_up, len(engine.seen)) == (was + 1, runs + 5)


@pytest.mark.parametrize("change", ["initialize_kv_cache", "capture_model", "shutdown", "reset_lora_state"])
def test_no_graph_of_the_model_outlives_those_of_its_runner(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    runner: Any = object.__new__(GptOssModelRunner)
    runner.short_way, runner.taken = engine.short_way, engine.short_way.take(engine.step(["a", "b"]))
    before: list[bool] = []
    monkeypatch.setattr(GPUModelRunner, change, lambda *_, **__: before.append(runner.short_way is None), raising=False)
    getattr(runner, change)(**({"profile_only": True} if change == "capture_model" else {}))
    if change == "reset_lora_state":  # replaces weights in place: vLLM's graphs stay, ours and the batch go
        assert not runner.short_way.graphs.works
        assert runner.short_way.batch is runner.short_way.ready is None
    else:
        assert before == [True], "dropped before vLLM's go"
        assert runner.short_way is runner.taken is None


def test_only_who_asks_gets_it(engine: Engine) -> None:
    """Without `host=ahead` each step prepares its inputs, and its graph is vLLM's to run."""
    engine.short_way.prepares_ahead = False
    was = engine.looked_up
    engine.decode("a", "b")
    assert all(engine.decode("a", "b") for _ in range(5))
    assert engine.looked_up == was + 6


def test_many_requests_prepare_when_the_step_begins(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them needs a block nearly every step."""
    monkeypatch.setattr(model_runner, "AHEAD", 2)
    assert not all(engine.decode("a", "b") for _ in range(5))
    assert all(engine.decode("a", "b", "c") for _ in range(5))


@pytest.mark.parametrize("suits", [True, False])
def test_a_wish_that_cannot_be_met_ends_the_start(monkeypatch: pytest.MonkeyPatch, suits: bool) -> None:
    monkeypatch.setattr("vllm_gptoss._vllm.runner.suits", lambda config: suits)
    config = SimpleNamespace(additional_config={"gptoss": {"host": "ahead"}})
    if suits:
        assert plugin._wants_runner(config)
        return
    with pytest.raises(ChoiceError, match="host=ahead cannot run here.*use host=auto"):
        plugin._wants_runner(config)
