"""Random requests through one engine, whose steps go by our runner and scheduler, by vLLM's, or now so, now so:

    python -m tests.gpu.either_way '{"blocks": 400, "caching": true, "kinds": ["greedy", "seeded"], "seed": 1}'

Two layers of the 20b with dummy weights, whose tokens any other bit of a logit changes. Prints one JSON line: requests
that said something else, and how many steps went which way. The engine lives in this process.
"""

from __future__ import annotations

import collections
import json
import os
import random
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

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
    "logprobs": lambda rng: {"logprobs": 3},
}
VLLM, OURS, MIXED = "vllm", "ours", "mixed"
Request = tuple[int, int, list[int], dict[str, Any], int | None]
"""Step of its arrival, name, prompt, sampling, step at which it is aborted."""


def engine(blocks: int, caching: bool) -> Any:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "gptoss"}
    from vllm import LLM

    from vllm_gptoss.bench import shapes
    from vllm_gptoss.plugin import register

    register()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(shapes.model_config(shapes.shape("20b:2"))))
        return LLM(
            model=directory, load_format="dummy", skip_tokenizer_init=True, max_model_len=512, max_num_seqs=32,
            max_num_batched_tokens=256, num_gpu_blocks_override=blocks, enable_prefix_caching=caching,
            gpu_memory_utilization=0.05, kv_cache_memory_bytes=2**28,
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32]},
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


class Ways:
    """Sends the steps of an engine one way or the other."""

    def __init__(self, made: Any) -> None:
        core = made.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.scheduler, self.short_way = core.scheduler, self.runner.short_way
        self.steps: dict[str, int] = collections.Counter()
        assert self.short_way is not None, "the runner has no short way here"
        self.take = self.short_way.take
        self.short_way.take = self.count

    def count(self, *step: Any) -> Any:
        taken = self.take(*step)
        self.steps["short" if taken is not None else "long"] += 1
        self.steps["sampled by vLLM"] += taken is not None and taken.batch.sampling is None
        self.steps["preempted"] += len(step[0].preempted_req_ids or ())
        return taken

    def go(self, short: bool, quick: bool) -> None:
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        self.runner.short_way = self.short_way if short else None
        if not short:
            self.short_way.batch = None
        self.scheduler.has_short_way = quick
        blocks = self.scheduler.kv_cache_manager
        vars(blocks).pop("allocate_slots", None)
        if not quick:
            blocks.allocate_slots = types.MethodType(KVCacheManager.allocate_slots, blocks)


def play(made: Any, ways: Ways, work: list[Request], way: str) -> dict[int, Any]:
    """What each request said: its tokens, how it ended, and its logprobs."""
    import numpy as np
    from vllm import SamplingParams

    made.reset_prefix_cache()
    np.random.seed(0)  # of it vLLM draws the seeds of requests without one
    rng = random.Random(99)
    todo, said, step = collections.deque(work), {}, 0
    aborts: dict[int, list[str]] = collections.defaultdict(list)
    while todo or made.has_unfinished_requests():
        while todo and todo[0][0] <= step:
            _, name, prompt, params, stop = todo.popleft()
            made.add_request(
                f"{way}-{name}",
                {"prompt_token_ids": prompt},
                SamplingParams(ignore_eos=True, detokenize=False, **params),
            )
            if stop is not None:
                aborts[stop].append(f"{way}-{name}")
        if step in aborts:
            made.abort_request(aborts[step])
        ours = way == OURS
        ways.go(*((ours, ours) if way != MIXED else (rng.random() < 0.7, rng.random() < 0.5)))
        for output in made.step():
            one = output.outputs[0]
            logprobs = one.logprobs and [sorted((at, lp.logprob) for at, lp in each.items()) for each in one.logprobs]
            said[int(output.request_id.rpartition("-")[2])] = (list(one.token_ids), one.finish_reason, logprobs)
        step += 1
    return said


def main(blocks: int, caching: bool, kinds: list[str], seed: int, rounds: int = 2) -> dict[str, Any]:
    made = engine(blocks, caching)
    ways = Ways(made)
    found: dict[str, Any] = {"requests": 0, "tokens": 0, "different": []}
    for turn in range(rounds):
        work = requests(seed + turn, kinds, spread=(1, 150)[turn % 2])
        wanted = play(made, ways, work, VLLM)
        found["requests"] += len(wanted)
        found["tokens"] += sum(len(tokens) for tokens, _, _ in wanted.values())
        for way in (OURS, MIXED):
            said = play(made, ways, work, way)
            found["different"] += [
                {"turn": turn, "way": way, "asked": params, "wanted": wanted[name], "said": said.get(name)}
                for _, name, _, params, _ in work
                if said.get(name) != wanted.get(name)
            ]
    return {**found, "steps": dict(ways.steps)}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
