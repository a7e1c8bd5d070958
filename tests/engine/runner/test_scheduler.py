"""The quick scheduler makes the same steps and outputs as vLLM's, for random requests."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plans as planning
from benchmarks import shapes
from tests.support.places import CACHE
from tests.support.vllm_log import lines
from vllm_gptoss.cli.recipes import probe
from vllm_gptoss.cli.recipes.model_config import model_config

pytestmark = pytest.mark.vllm

UNPACKED = CACHE / "vllm-0.33.0"
SEEDS = range(1 if "GPTOSS_TEST_RELEASE" in os.environ else 4)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(model_config(shapes.TINY)))
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", max_model_len=512, max_num_seqs=12,
        max_num_batched_tokens=64, enable_prefix_caching=True, enforce_eager=True,
    )  # fmt: skip
    return arguments.create_engine_config()


def scheduler(config: Any, kind: type, blocks: int, caching: bool) -> Any:
    config.cache_config.enable_prefix_caching = caching
    return planning.scheduler(config, kind, blocks)


def request(name: str, rng: random.Random, shared: list[int]) -> Any:
    """With a prompt that begins with `shared`."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    prompt = shared + [rng.randrange(1000) for _ in range(rng.choice([1, 15, 16, 17, 31, 32, rng.randint(1, 200)]))]
    stops = rng.sample(range(1000), rng.choice([0, 0, 2, 10]))
    most = rng.randint(1, 120)
    params = SamplingParams(max_tokens=most, min_tokens=min(most, rng.choice([0, 0, 3])), stop_token_ids=stops)
    params.update_from_generation_config({}, eos_token_id=rng.choice([None, 7]))
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        client_index=rng.randrange(3),
        trace_headers=rng.choice([None, None, None, {"traceparent": name}]),
        block_hasher=get_request_block_hasher(planning.BLOCK, sha256),
    )


def plan(output: Any) -> Any:
    """What a worker reads of a step."""
    cached = output.scheduled_cached_reqs
    new = [(r.req_id, r.block_ids, r.num_computed_tokens) for r in output.scheduled_new_reqs]
    old = list(
        zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
    )
    rest = {f.name: getattr(output, f.name) for f in dataclasses.fields(output) if not f.name.startswith("scheduled_")}
    return new, old, list(output.num_scheduled_tokens), rest


def told(messages: dict[int, Any]) -> Any:
    """What clients read of a step: of each request all but times, who has ended, and the statistics of the engine."""
    outputs, ended, statistics = {}, {}, []
    for client, message in messages.items():
        for output in message.outputs:
            events = [event.type for event in output.events or ()]
            fields = {name: getattr(output, name) for name in output.__struct_fields__ if name != "events"}
            outputs[client, output.request_id] = (fields, events)
        ended[client] = message.finished_requests
        if message.scheduler_stats is not None:
            statistics.append((client in {client for client, _ in outputs}, message.scheduler_stats))
    return outputs, {client: names for client, names in ended.items() if names}, set(messages), statistics


def answer(names: dict[str, bool], rng: random.Random) -> Any:
    """A token for each request that has completed prefill in that step, and none for the others."""
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=list(names),
        req_id_to_index={name: place for place, name in enumerate(names)},
        sampled_token_ids=[[rng.randrange(1000)] if decodes else [] for decodes in names.values()],
    )


def run(made: Any, seed: int, counts: dict[str, int], copies: bool = False) -> list[Any]:
    """Plans and messages of a run. `seed` determines requests, aborts and tokens. Two steps are in flight.

    copies: requests begin with the tokens of running ones, and with an odd `seed` one step is in flight.
    """
    from vllm.v1.request import RequestStatus

    rng = random.Random(seed)
    shared = [rng.randrange(1000) for _ in range(100)]
    arrivals = sorted((rng.randrange(200), f"r{i}") for i in range(40))
    plans, under_way, step, in_flight = [], [], 0, 1 if copies and seed % 2 else 2
    while arrivals or made.has_requests() or under_way:
        while arrivals and arrivals[0][0] <= step:
            begins = [shared[: rng.choice([0, 40, 100])]]
            if copies:  # of requests whose last block is full since the last step
                full = [one._all_token_ids[:] for one in made.running if len(one._all_token_ids) % planning.BLOCK == 0]
                begins += [tokens for tokens in full if len(tokens) < 200]
            made.add_request(request(arrivals.pop(0)[1], rng, begins[-1]))
        if rng.random() < 0.03 and made.running:
            made.finish_requests([rng.choice(made.running).request_id], RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.01:
            made.reset_prefix_cache(reset_running_requests=True)
        output = made.schedule()
        sent = pickle.loads(pickle.dumps(output))  # as vLLM's executor of several processes does
        plans.append((plan(sent), made.kv_cache_manager.block_pool.get_num_free_blocks()))
        counts["preempted"] += len(output.preempted_req_ids or ())
        reads = {name: not made.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
        if reads:
            under_way.append((output, reads))
        if under_way and (len(under_way) == in_flight or not reads):
            done, reads = under_way.pop(0)
            plans.append(told(made.update_from_output(done, answer(reads, rng))))
        step += 1
        assert step < 5000
    return plans


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("blocks", [60, 400])
@pytest.mark.parametrize(("seed", "copies"), [*product(SEEDS, [False]), *product(SEEDS[:2], [True])])
def test_plans_are_the_same(config: Any, blocks: int, caching: bool, seed: int, copies: bool) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from vllm_gptoss.engine.runner.scheduler import GptOssScheduler, QuickKVCacheManager

    class Counting(GptOssScheduler):
        short_steps = beside_others = repeated = went_on = 0

        def _schedule(self, *found: Any) -> Any:
            self.short_steps += 1
            self.beside_others += not found[-1]
            return super()._schedule(*found)

        def _of_nobody(self, *step: Any) -> Any:
            before = self.nobody
            planned = super()._of_nobody(*step)
            self.repeated += before is self.nobody is not None
            return planned

        def _go_on(self, *step: Any) -> Any:
            left = super()._go_on(*step)
            self.went_on += len(step[0]) - len(left)
            return left

    counts = {"preempted": 0}
    theirs = scheduler(config, AsyncScheduler, blocks, caching)
    wanted = run(theirs, seed, counts, copies)
    ours = scheduler(config, Counting, blocks, caching)
    assert type(ours.kv_cache_manager) is QuickKVCacheManager
    asked: list[bool] = []
    needs = ours.kv_cache_manager.needs_nothing
    ours.kv_cache_manager.needs_nothing = lambda request: asked.append(needs(request)) or asked[-1]
    found = run(ours, seed, {"preempted": 0}, copies)
    assert found == wanted
    assert sum(asked) > len(asked) / (3 if copies else 2), "it should spare most of the searches"
    assert ours.short_steps > 20, "hardly any step went the short way"
    assert ours.beside_others > 5, "hardly any step was planned with others"
    assert ours.repeated > 20, "vLLM planned nearly all empty steps"
    assert ours.went_on > 50, "vLLM took nearly all tokens"
    kept = ("current_step", "num_executed_steps", "sched_step_seq", "prefill_capacity_bound", "last_prefill_step")
    assert [vars(ours).get(name) for name in kept] == [vars(theirs).get(name) for name in kept]
    if blocks <= 60:
        assert counts["preempted"], "too many blocks for this test"


@pytest.mark.parametrize("part", ["_is_plain", "_decoding"])
def test_a_failure_of_ours_leaves_planning_to_vllm(
    config: Any, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, part: str
) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from vllm_gptoss.engine.runner.scheduler import GptOssScheduler

    calls = iter([AttributeError("moved")])  # `planning.scheduler` calls `_is_plain` again

    def fails(self: Any) -> Any:
        for error in calls:
            raise error
        return False

    monkeypatch.setattr(GptOssScheduler, part, fails)
    counts = {"preempted": 0}
    found = run(scheduler(config, GptOssScheduler, 60, True), 1, counts)
    assert found == run(scheduler(config, AsyncScheduler, 60, True), 1, counts)
    assert lines(said) == ["host: scheduler: upstream from here on (AttributeError: moved)"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_engine_of_several_workers_asks_for_short_slices(
    config: Any, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Its scheduler runs in another process than the workers. With one GPU the worker asks for both."""
    from vllm_gptoss.engine.runner import scheduler as ours

    asked: list[bool] = []
    monkeypatch.setattr(ours.slices, "ask_short", lambda: asked.append(True))
    monkeypatch.setattr(config.parallel_config, "world_size", ranks)
    scheduler(config, ours.GptOssScheduler, 60, True)
    assert any(asked) is (ranks > 1)


def test_all_that_ends_an_answer_is_in_one_set() -> None:
    """`GptOssScheduler._go_on` checks only this set. Tokens in the set that do not end the answer cost only time."""
    from vllm.sampling_params import SamplingParams

    for ignores in (False, True):
        params = SamplingParams(stop_token_ids=[5, 9], ignore_eos=ignores)
        params.update_from_generation_config({"eos_token_id": [3, 7]}, eos_token_id=7)
        asked = {params.eos_token_id, *(params.stop_token_ids or ())} - {None}
        assert asked >= {5, 9}
        assert asked <= params._all_stop_token_ids


@pytest.mark.slow
@pytest.mark.skipif(not UNPACKED.is_dir(), reason="scripts/vllm_source.py unpacks it")
def test_plans_are_the_same_in_the_release_for_cuda(tmp_path: Path) -> None:
    """The tests above, with the schedulers of the release that our runner mirrors."""
    if "GPTOSS_TEST_RELEASE" in os.environ:
        import vllm

        assert vllm.__version__.startswith("0.33.")
        return
    path = os.pathsep.join(map(str, (probe._platform_plugin(tmp_path), UNPACKED)))
    environ = {**os.environ, "PYTHONPATH": path, "VLLM_PLUGINS": probe._PLUGIN, "GPTOSS_TEST_RELEASE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:]
