"""After any event between two steps, the model gets each request's last token, position and slot."""

from __future__ import annotations

import copy
import logging
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.engine.runner.host_engine import LIMIT, PARTS, PLAIN, ROWS, SIZE, TOP_K, Engine, HostGraphs
from tests.support.vllm_log import heard, lines
from vllm_gptoss import fallback
from vllm_gptoss.engine.choose import ChoiceError, Deployment
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.runner import batch, captured_steps, eligibility, graphs, model_runner
from vllm_gptoss.engine.runner.model_runner import GptOssModelRunner
from vllm_gptoss.engine.spec import GPT_OSS_20B

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


BROKEN: dict[str, Callable[[Engine], tuple[Any, str, Any]]] = {
    "reading the step": lambda _: (eligibility, "only_decodes", fails),
    "choosing a graph": lambda engine: (engine.runner.cudagraph_manager, "dispatch", fails),
    "making the batch": lambda _: (model_runner, "begin", fails),
    "setting the lengths": lambda engine: (engine.states, "num_computed_prefill_tokens", np.zeros(1)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_failure_before_any_launch_leaves_the_step_to_vllm(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, broken: str
) -> None:
    """The same step, and all that follow; vLLM appends the step's blocks, so none may be there yet."""
    runner: Any = object.__new__(GptOssModelRunner)
    runner.short_way, by_vllm = engine.short_way, []
    monkeypatch.setattr(GPUModelRunner, "execute_model", lambda self, step: by_vllm.append(step) or "vLLM's")
    engine.length |= dict.fromkeys(("a", "b", "c"), 4 * SIZE)
    launched, held = list(engine.seen), copy.deepcopy(engine.runner.block_tables.held)
    steps = [engine.step(["a", "b", "c"]) for _ in range(2)]
    with monkeypatch.context() as during:
        during.setattr(*BROKEN[broken](engine))
        assert runner.execute_model(steps[0]) == "vLLM's"
    assert runner.execute_model(steps[1]) == "vLLM's"
    assert by_vllm == steps
    assert runner.taken is None
    assert (engine.seen, engine.runner.block_tables.held) == (launched, held)
    (line,) = lines(said)
    assert re.fullmatch(r"host: upstream from here on \((Attribute|Value)Error: .*\)", line)


def test_a_failure_after_vllms_states_have_the_step_is_raised(engine: Engine) -> None:
    """vLLM would append the step's blocks a second time."""
    engine.length |= dict.fromkeys(("a", "b"), 4 * SIZE)
    engine.short_way.buffers.add_blocks = engine.short_way.buffers.fill_blocks = fails
    with pytest.raises(AttributeError, match="moved"):
        engine.short_way.take(engine.step(["a", "b"]))


@pytest.mark.parametrize(("ranks", "ends"), [(1, AttributeError), (2, SystemExit)])
def test_one_of_several_ranks_ends_its_process_then(engine: Engine, ranks: int, ends: type[BaseException]) -> None:
    """vLLM only logs an exception of a rank other than the first."""
    runner: Any = object.__new__(GptOssModelRunner)
    runner.short_way, engine.short_way.ranks = engine.short_way, ranks
    engine.length |= dict.fromkeys(("a", "b"), 4 * SIZE)
    engine.short_way.buffers.add_blocks = engine.short_way.buffers.fill_blocks = fails
    with pytest.raises(ends, match="moved"):
        runner.execute_model(engine.step(["a", "b"]))


@pytest.mark.parametrize("fails", [False, True])
def test_where_a_graph_cannot_be_had_steps_are_launched(engine: Engine, fails: bool) -> None:
    graphs = engine.short_way.graphs
    graphs.fails = fails
    for _ in range(5):
        engine.decode("a", "b", "c")
    assert [graphs.works[key].graph is None for key in (("before", 3), ("after", 3, PLAIN))] == [fails, fails]


def test_each_batch_samples_by_what_its_own_requests_asked_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, the first batch of a size decided for all later batches of that size. Its rows then belonged to requests
    without sampling parameters, and top-k was not applied."""
    monkeypatch.setattr(batch, "sampling", lambda *_: TOP_K)
    sampler, rows = engine.short_way.buffers.sampler, []
    draw = sampler.sample
    sampler.sample = lambda *given: rows.append(given[3].tolist()) or draw(*given)
    for names in ("bc", "ac", "ca"):
        engine.decode(*names)
    index = engine.states.req_id_to_index
    assert rows == [[index[name] for name in names] for names in ("bc", "ac", "ca")]


@pytest.mark.parametrize("room", [captured_steps.LOGITS_BYTES, 0])
def test_on_several_gpus_every_step_gathers_its_own_logits_outside_our_graphs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """A replayed graph reads them at one address. If a graph contained the collective, the peers might wait after a
    failed capture of one rank. room: for a graph's logits; without it steps are launched."""
    del engine
    inside: list[bool] = []
    gathered: list[bool] = []
    read: list[float] = []

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        gathered.append(bool(inside))
        return torch.full((len(hidden), 1000), float(len(gathered)))

    def after(*given: Any) -> Any:
        made = captured(*given)

        def launch() -> None:
            inside.append(True)
            made.launch()
            inside.pop()

        return graphs.Launches(launch, made.captures)

    captured = captured_steps.after
    monkeypatch.setattr(captured_steps, "after", after)
    monkeypatch.setattr(captured_steps, "LOGITS_BYTES", room)
    monkeypatch.setattr(batch, "LOGITS_BYTES", room)
    made = Engine(ranks=2)
    made.runner.model.compute_logits = compute_logits
    draw = made.short_way.buffers.sampler.sample
    made.short_way.buffers.sampler.sample = lambda logits, *rest: (
        read.append(float(logits[-1, -1])) or draw(logits, *rest)
    )
    made.leave_to_vllm("a", "b")
    for _ in range(2 * SIZE):
        made.decode("a", "b")
    assert gathered == [False] * 2 * SIZE
    assert read == list(range(1, 2 * SIZE + 1))
    assert (made.short_way.graphs.works["after", 2, PLAIN].graph is None) is (room == 0)


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


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"graphs": False}, "no CUDA graphs are captured"),
        ({"lora": True}, "LoRA is not limited to attention"),
        ({"drafts": "ngram", "draft_tokens": 3}, "drafts by ngram"),
    ],
)
@pytest.mark.parametrize("host", ["auto", "gptoss"])
def test_a_configuration_that_the_runner_cannot_serve_is_reported_before_the_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, host: str, changes: dict[str, Any], why: str
) -> None:
    """In the constructor: a user would otherwise wait for the weights, and without graphs vLLM captures nothing."""
    config = SimpleNamespace(additional_config={"gptoss": {"host": host}})
    found = Deployment(GPT_OSS_20B, **changes)
    monkeypatch.setattr(GPUModelRunner, "__init__", lambda self, config, device: setattr(self, "vllm_config", config))
    monkeypatch.setattr(eligibility.device, "detect", lambda: Device("nvidia", "NVIDIA H200", "sm90", 139.8))
    monkeypatch.setattr(eligibility.describe, "configuration", lambda config: found)
    with pytest.raises(ChoiceError, match=why) if host == "gptoss" else nullcontext():
        GptOssModelRunner(config, torch.device("cpu"))
    assert [line for line in lines(said) if why in line] == lines(said)
    assert len(lines(said)) == (host == "auto")


def test_vllms_sampler_gets_the_step_of_the_short_way(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar, log-probabilities and penalties are its own."""
    runner: Any = object.__new__(GptOssModelRunner)
    runner.short_way, runner.req_states = engine.short_way, engine.states
    monkeypatch.setattr(GPUModelRunner, "sample_tokens", lambda self, grammar: (self.execute_model_state, grammar))
    assert runner.execute_model(engine.step(["a", "b"], finished_req_ids={"c"})) is None
    given, grammar = runner.sample_tokens("a grammar")
    assert (grammar, given.finished_req_ids, given.num_spec_tokens_to_schedule) == ("a grammar", {"c"}, 0)
    assert given.input_batch.req_ids == ["a", "b"]
    assert given.input_batch.seq_lens_cpu_upper_bound.tolist() == [engine.length["a"] + 1, engine.length["b"] + 1]


def test_a_kv_connector_is_notified_as_around_vllms_graph(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a step, before and after the model, and with the requests that have ended. Where vLLM samples, vLLM's own
    `sample_tokens` sends the last notification."""
    connector, nothing = engine.runner.kv_connector, SimpleNamespace(load_jobs={}, store_jobs={})
    connector.told.clear()
    ran = len(engine.seen)
    step = engine.step(["a", "b"], kv_connector_metadata=nothing, finished_req_ids={"c"})
    taken = engine.short_way.take(step)
    before = [("pre_forward", ran, nothing, ["a", "b"]), ("finish_forward", ran + 1)]
    assert connector.told == before
    output = engine.short_way.sample(taken)
    assert connector.told == [*before, ("post_forward", ran + 1, {"c"}, False)]
    monkeypatch.setattr(output, "ready", SimpleNamespace(synchronize=lambda: None), raising=False)
    monkeypatch.setattr(captured_steps.vllm, "parts", lambda: SimpleNamespace(ModelRunnerOutput=SimpleNamespace))
    assert output.get_output().kv_connector_output == output.get_kv_connector_output() == f"output {ran + 1}"


def test_a_step_with_an_adapter_is_vllms_and_one_without_is_told_so(engine: Engine) -> None:
    """vLLM's LoRA kernels read on the host whether a token has an adapter: the flag of vLLM's step must not stay."""
    adapters: list[tuple[Any, ...]] = []
    engine.runner.lora_config, engine.runner.lora_state = SimpleNamespace(), LoraState(ROWS)
    engine.runner._set_active_loras = lambda *given: adapters.append(given)
    for name, adapter in (("a", None), ("b", None), ("c", LoRARequest("an adapter", 1, "a folder"))):
        engine.runner.lora_state.add_request(name, engine.states.req_id_to_index[name], adapter)
    engine.decode("a", "b")
    engine.decode("b", "a")
    launched = list(engine.seen)
    assert engine.short_way.take(engine.step(["b", "a", "c"])) is None
    assert engine.seen == launched
    assert adapters == [((0, 0), (0, 0), set())], "of the new batch; those of a vLLM step are vLLM's"
    engine.decode("b", "a")
    assert adapters == [((0, 0), (0, 0), set())] * 2, "once more after vLLM's step"


def test_a_step_that_transfers_is_vllms(engine: Engine) -> None:
    connector = engine.runner.kv_connector
    connector.told.clear()
    step = engine.step(["a", "b"], kv_connector_metadata=SimpleNamespace(load_jobs={}, store_jobs={3: "a job"}))
    assert engine.short_way.take(step) is None
    assert connector.told == [], "vLLM notifies the connector of its own step"
    engine.decode("a", "b", kv_connector_metadata=SimpleNamespace(load_jobs={}, store_jobs={}))


@pytest.mark.parametrize("why", [None, "a connector"])
@pytest.mark.parametrize("connected", [False, True])
def test_the_capture_decides_once_whether_steps_are_replayed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str | None, connected: bool
) -> None:
    runner: Any = object.__new__(GptOssModelRunner)
    runner.wish, runner.may_replay, runner.kv_connector = "auto", True, engine if connected else None
    monkeypatch.setattr(GPUModelRunner, "capture_model", lambda self: 7)
    monkeypatch.setattr(eligibility, "why_not", lambda runner: why)
    monkeypatch.setattr(model_runner.slices, "ask_short", lambda: None)
    monkeypatch.setattr(model_runner, "ShortWay", lambda runner: engine.short_way)
    monkeypatch.setattr(fallback, "_said", set())
    with heard(caplog, logging.INFO):
        assert runner.capture_model() == 7
    assert runner.short_way is (None if why else engine.short_way)
    off = "host: upstream from here on (a connector)"
    said = ["host: decode steps are replayed (GPTOSS_HOST=stock turns it off)"]
    said += ["host: vLLM plans every step, and runs those in which the KV connector loads or stores"] * connected
    assert lines(caplog) == ([off] if why else said)


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
