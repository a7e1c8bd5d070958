"""Random requests through one engine with our runner and scheduler, with vLLM's, and with both in alternation:

    python -m tests.gpu.either_way '{"blocks": 400, "caching": true, "kinds": ["greedy", "seeded"], "seed": 1}'
    python -m tests.gpu.either_way 8 60        # eight concurrent engines, requests for a minute

Runs two layers of the 20b with dummy weights. The sampled tokens change with any bit of a logit. Prints one JSON line:
requests with different tokens, and the number of steps by path. The engine runs in this process. With `plants`,
faults are planted in the plugin's path, one after another, and each must be detected. With `ranks`, so many GPUs share
the model, each with a worker's process, and in alternation each rank goes its own way.
"""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
KINDS: dict[str, Any] = {
    "greedy": lambda rng: {},
    "seeded": lambda rng: {"temperature": 0.7, "seed": rng.randrange(10**6)},
    "unseeded": lambda rng: {"temperature": 1.0},
    "min_p": lambda rng: {"temperature": 1.2, "min_p": 0.1, "seed": 5},
    "top_k": lambda rng: {"temperature": 0.9, "top_k": rng.choice([1, 5, 40]), "seed": 3},
    "top_p": lambda rng: {"temperature": 0.8, "top_p": 0.9, "top_k": rng.choice([-1, 50])},
    "penalties": lambda rng: {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "bias": lambda rng: {"logit_bias": {7: 5.0, 11: 3.0}},
    "min_tokens": lambda rng: {"max_tokens": 20, "min_tokens": 5, "stop_token_ids": list(range(0, 192, 3))},
    "stops": lambda rng: {"temperature": 1.0, "seed": 4, "stop_token_ids": rng.sample(range(201_088), 20_000)},
    "logprobs": lambda rng: {"logprobs": 3},
    "choice": lambda rng: {"grammar": {"choice": ["positive", "negative", "neither of them"]}},
    "json": lambda rng: {"temperature": 1.0, "seed": rng.randrange(9), "grammar": {"json": json.dumps(PERSON)}},
}
PLAIN = ["greedy", "seeded", "unseeded", "min_p", "stops"]
JOBS: tuple[dict[str, Any], ...] = (
    {"blocks": 2000, "caching": False, "kinds": PLAIN},
    {"blocks": 2000, "caching": True, "kinds": list(KINDS)},
    {"blocks": 250, "caching": True, "kinds": list(KINDS)},
    {"blocks": 250, "caching": True, "kinds": PLAIN},
)
"""What engines side by side do, in turn."""
VLLM, OURS, MIXED = "vllm", "ours", "mixed"
Request = tuple[int, int, list[int], dict[str, Any], int | None]
"""Step of its arrival, name, prompt, sampling, step at which it is aborted."""


def engine(blocks: int, caching: bool, tokenizer: str | None = None, drafts: int = 0, ranks: int = 1) -> Any:
    """tokenizer: a folder with that of gpt-oss, which grammars need; the checkout's own where None. drafts: of EAGLE3,
    of which vLLM accepts the first of each step without a look at it."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "gptoss"}
    from vllm import LLM

    from benchmarks import served, shapes
    from benchmarks.decode.worker import draft_config
    from vllm_gptoss.cli.recipes.model_config import model_config
    from vllm_gptoss.plugin import register

    register()
    with tempfile.TemporaryDirectory() as directory:
        # EAGLE3 reads three states; of six layers, two of them would be the same
        shape = shapes.shape("20b:8" if drafts else "20b:2")
        wishes = {"gptoss": {"layers": "gptoss", "host": "gptoss", "experts": "gptoss"}}
        options: dict[str, Any] = {"additional_config": wishes} if ranks > 1 else {}
        sizes = [1, 2, 4, 8, 16, 24, 32]
        (Path(directory) / "config.json").write_text(json.dumps(model_config(shape)))
        if drafts:
            draft = Path(directory) / "draft"
            draft.mkdir()
            (draft / "config.json").write_text(json.dumps(draft_config(shape)))
            accepted = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
            head = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": drafts, **accepted}
            sizes += [64, 96, 128]
            options = {"speculative_config": head, "additional_config": wishes}
        served.write_tokenizer(Path(directory), Path(tokenizer) if tokenizer else None)
        return LLM(
            model=directory, load_format="dummy", max_model_len=512, max_num_seqs=32, max_num_batched_tokens=256,
            num_gpu_blocks_override=blocks, enable_prefix_caching=caching, gpu_memory_utilization=0.05,
            kv_cache_memory_bytes=2**28, structured_outputs_config={"enable_in_reasoning": True},
            compilation_config={"cudagraph_capture_sizes": sizes}, tensor_parallel_size=ranks,
            **options,
        ).llm_engine  # fmt: skip


def requests(seed: int, kinds: list[str], spread: int, count: int = 60) -> list[Request]:
    rng = random.Random(seed)
    shared = [rng.randrange(190_000) for _ in range(200)]
    made = []
    for name in range(count):
        own = rng.choice([1, 2, 15, 16, 17, rng.randint(1, 300)])
        prompt = shared[: rng.choice([0, 0, rng.randint(1, 200)])] + [rng.randrange(190_000) for _ in range(own)]
        params = {"max_tokens": rng.randint(1, 90), "temperature": 0.0, **KINDS[rng.choice(kinds)](rng)}
        at = rng.randrange(spread)
        made.append((at, name, prompt[:400], params, at + rng.randint(1, 60) if rng.random() < 0.15 else None))
    return sorted(made, key=lambda request: request[:2])


def observe(worker: Any) -> None:
    """Counts the steps of a worker by path. This and the next three run in its process, without this module."""
    runner = worker.worker.model_runner
    short_way, steps = runner.short_way, {}
    assert short_way is not None, "the runner has no short way here"
    take = short_way.take

    def count(*step: Any) -> Any:
        taken = take(*step)
        counted = {
            "short" if taken is not None else "long": 1,
            "sampled by vLLM": taken is not None and taken.batch.sampling is None,
            "with a grammar": taken is not None and step[0].has_structured_output_requests,
            "preempted": len(step[0].preempted_req_ids or ()),
        }
        for name, more in counted.items():
            steps[name] = steps.get(name, 0) + more
        return taken

    short_way.take, runner.observed = count, (short_way, steps)


def counted(worker: Any) -> dict[str, int]:
    return dict(worker.worker.model_runner.observed[1])


def lead(worker: Any, short: list[bool]) -> None:
    """short: of each rank, whether its next step goes the plugin's way."""
    runner = worker.worker.model_runner
    short_way = runner.observed[0]
    runner.short_way = short_way if short[worker.rpc_rank] else None
    if runner.short_way is None:
        short_way.batch = None


def draw_again(worker: Any) -> None:
    """Of this generator vLLM draws the seeds of requests without one."""
    import numpy as np

    del worker
    np.random.seed(0)


class Ways:
    """Sends the steps of an engine one way or the other. runner, short_way: those of one GPU."""

    def __init__(self, made: Any) -> None:
        core = made.engine_core.engine_core
        self.scheduler, self.call = core.scheduler, core.model_executor.collective_rpc
        self.plans = self.scheduler.has_short_way
        self.call(observe)
        self.ranks = len(self.steps())
        if self.ranks == 1:
            self.runner = core.model_executor.driver_worker.worker.model_runner
            self.short_way = self.runner.short_way

    def steps(self) -> list[dict[str, int]]:
        """Of each rank."""
        found: list[dict[str, int]] = self.call(counted)
        return found

    def go(self, short: list[bool], quick: bool) -> None:
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        self.call(lead, args=(short,))
        self.scheduler.has_short_way = quick and self.plans
        blocks = self.scheduler.kv_cache_manager
        vars(blocks).pop("allocate_slots", None)
        if not quick:
            blocks.allocate_slots = types.MethodType(KVCacheManager.allocate_slots, blocks)

    def wait_for_grammar(self, name: str) -> None:
        """Until it is compiled, which takes another time each time, and would change who decodes with whom."""
        for request in self.scheduler.requests.values():
            if request.request_id.startswith(name) and request.structured_output_request is not None:
                while not request.structured_output_request.is_grammar_ready:
                    time.sleep(0.001)


def sampling(params: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = dict(params)
    grammar = params.pop("grammar", None)
    if grammar is not None:
        params["structured_outputs"] = StructuredOutputsParams(**grammar)
    return SamplingParams(ignore_eos=grammar is None, detokenize=False, **params)


def play(made: Any, ways: Ways, work: list[Request], way: str) -> dict[int, Any]:
    """The output of each request: tokens, finish reason and logprobs."""
    made.reset_prefix_cache()
    ways.call(draw_again)
    rng = random.Random(99)
    todo, said, step = collections.deque(work), {}, 0
    aborts: dict[int, list[str]] = collections.defaultdict(list)
    while todo or made.has_unfinished_requests():
        while todo and todo[0][0] <= step:
            _, name, prompt, params, stop = todo.popleft()
            made.add_request(f"{way}-{name}", {"prompt_token_ids": prompt}, sampling(params))
            ways.wait_for_grammar(f"{way}-{name}")
            if stop is not None:
                aborts[stop].append(f"{way}-{name}")
        if step in aborts:
            made.abort_request(aborts[step])
        ours = way == OURS
        short = [rng.random() < 0.7 if way == MIXED else ours for _ in range(ways.ranks)]
        ways.go(short, rng.random() < 0.5 if way == MIXED else ours)
        for output in made.step():
            one = output.outputs[0]
            logprobs = one.logprobs and [sorted((at, lp.logprob) for at, lp in each.items()) for each in one.logprobs]
            said[int(output.request_id.rpartition("-")[2])] = (list(one.token_ids), one.finish_reason, logprobs)
        step += 1
    return said


def differing(work: list[Request], wanted: dict[int, Any], said: dict[int, Any]) -> list[dict[str, Any]]:
    return [
        {"asked": params, "wanted": wanted.get(name), "said": said.get(name)}
        for _, name, _, params, _ in work
        if said.get(name) != wanted.get(name)
    ]


def another_token(ways: Ways) -> Callable[[], None]:
    """A step's first token on its way to the host, once in a while."""
    sample, turns = ways.short_way.sample, [0]

    def planted(taken: Any) -> Any:
        output, turns[0] = sample(taken), turns[0] + 1
        if turns[0] % 20 == 0:
            output.ready.synchronize()
            output.tokens = output.tokens.copy()
            output.tokens[0] ^= 1
        return output

    ways.short_way.sample = planted
    return lambda: vars(ways.short_way).pop("sample") and None


def lost_blocks(ways: Ways) -> Callable[[], None]:
    """New blocks do not reach the tables."""
    buffers = ways.short_way.buffers

    def planted(runner: Any) -> None:
        for table in runner.block_tables.block_tables:
            table.clear_staged_writes()

    buffers.add_blocks = planted
    return lambda: vars(buffers).pop("add_blocks") and None


def old_parameters(ways: Ways) -> Callable[[], None]:
    """Temperatures stay those of the batch before."""
    buffers = ways.short_way.buffers
    kept, buffers.parameters = buffers.parameters, {}

    def undo() -> None:
        buffers.parameters = kept

    return undo


def no_stops(ways: Ways) -> Callable[[], None]:
    """Stop tokens are gone on after."""
    go_on = ways.scheduler._go_on

    def planted(scheduled: dict[str, int], *rest: Any) -> Any:
        known = [ways.scheduler.requests[name].sampling_params for name in scheduled if name in ways.scheduler.requests]
        kept = [(params, params._all_stop_token_ids) for params in known]
        for params in known:
            params._all_stop_token_ids = set()
        left = go_on(scheduled, *rest)
        for params, stops in kept:
            params._all_stop_token_ids = stops
        return left

    ways.scheduler._go_on = planted
    return lambda: vars(ways.scheduler).pop("_go_on") and None


def no_grammar(ways: Ways) -> Callable[[], None]:
    """The mask of a replayed step's grammars is dropped."""
    runner = ways.runner
    sample = runner.sample_tokens
    runner.sample_tokens = lambda grammar: sample(None if runner.taken is not None else grammar)
    return lambda: vars(runner).pop("sample_tokens") and None


PLANTS = {
    plant.__name__.replace("_", " "): plant
    for plant in (another_token, lost_blocks, old_parameters, no_stops, no_grammar)
}


def find_plants(made: Any, ways: Ways, names: list[str], seed: int) -> dict[str, int]:
    """How many requests each fault changes, of those that vLLM's sampler does not take from us, or of grammars."""
    found = {}
    masks = [name for name in names if name == "no grammar"]
    for kinds, ours in ((PLAIN, [name for name in names if name not in masks]), (["choice", "json"], masks)):
        work = requests(seed, kinds, spread=100)
        wanted = play(made, ways, work, VLLM) if ours else {}
        for name in ours:
            undo = PLANTS[name](ways)
            found[name] = len(differing(work, wanted, play(made, ways, work, OURS)))
            undo()
    return found


def main(
    blocks: int,
    caching: bool,
    kinds: list[str],
    seed: int,
    rounds: int = 2,
    seconds: float = 0.0,
    plants: list[str] | None = None,
    tokenizer: str | None = None,
    drafts: int = 0,
    ranks: int = 1,
) -> dict[str, Any]:
    """seconds: as many rounds as are begun by then."""
    made = engine(blocks, caching, tokenizer, drafts, ranks)
    ways = Ways(made)
    found: dict[str, Any] = {"requests": 0, "tokens": 0, "different": []}
    began, turn = time.monotonic(), 0
    while turn < rounds or time.monotonic() - began < seconds:
        work = requests(seed + turn, kinds, spread=(1, 150)[turn % 2])
        wanted = play(made, ways, work, VLLM)
        found["requests"] += len(work)
        found["tokens"] += sum(len(tokens) for tokens, _, _ in wanted.values())
        for way in (OURS, MIXED):
            said = differing(work, wanted, play(made, ways, work, way))
            found["different"] += [{"turn": turn, "way": way, **one} for one in said]
        turn += 1
    found["seconds"] = round(time.monotonic() - began, 1)
    if plants:
        found["planted"] = find_plants(made, ways, plants, seed)
    steps = ways.steps()
    if ranks > 1:
        made.engine_core.shutdown()
    return {**found, "steps": steps[0], "ranks": steps}


def side_by_side(engines: int, seconds: float, tokenizer: str | None = None) -> dict[str, Any]:
    """The results of several engines, each in a separate process with other requests."""
    jobs = [
        {**JOBS[at % len(JOBS)], "seed": 10_000 * at, "seconds": seconds, "tokenizer": tokenizer}
        for at in range(engines)
    ]
    running = [
        subprocess.Popen([sys.executable, "-m", __spec__.name, json.dumps(job)], stdout=subprocess.PIPE, text=True)
        for job in jobs
    ]
    found: dict[str, Any] = {"requests": 0, "tokens": 0, "different": [], "failed": 0, "steps": collections.Counter()}
    for process in running:
        said = last_line(process.communicate()[0])
        if process.returncode or said is None:
            found["failed"] += 1
            continue
        for key in ("requests", "tokens", "different", "steps"):
            found[key] += collections.Counter(said[key]) if key == "steps" else said[key]
    return {**found, "steps": dict(found["steps"])}


def last_line(text: str) -> dict[str, Any] | None:
    """The JSON that `main` printed; vLLM may print more when it ends."""
    line = next((line for line in reversed(text.splitlines()) if line.startswith('{"')), None)
    return None if line is None else dict(json.loads(line))


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        print(json.dumps(side_by_side(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])))
    else:
        print(json.dumps(main(**json.loads(sys.argv[1]))))
