"""Time to plan a step and to process its tokens, without GPU or model: `python -m benchmarks.plans [1 8 64]`.

Runs vLLM's scheduler and the plugin's alternately in one process, with two steps in flight as in the engine. Reports µs
per step for the plan, for the update with the sampled tokens, and for the messages to the clients. The first case
decodes the same requests throughout. In the second, requests end and arrive, as on a loaded server.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import shapes
from vllm_gptoss.cli.recipes.model_config import model_config

if TYPE_CHECKING:
    import numpy as np

CLIENTS, BLOCK, BLOCKS, LONGEST = 4, 16, 60_000, 4096
PARTS = ("plan", "tokens", "messages")
VLLM, PLUGIN = "vLLM's", "the plugin's"


def _draws() -> np.random.Generator:
    import numpy as np  # comes with vLLM, which the command line does without

    return np.random.default_rng(0)


@dataclass
class Planned:
    """One scheduler with `count` requests; `changing`: their answers end, and others come."""

    scheduler: Any
    count: int
    changing: bool
    rng: np.random.Generator = field(default_factory=_draws)
    under_way: list[Any] = field(default_factory=list)

    def add(self, most: int) -> None:
        """A request with a prompt of up to 60 tokens and an answer of `most`."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        name = f"cmpl-{self.rng.bytes(16).hex()}-0-{self.rng.bytes(4).hex()}"
        prompt = self.rng.integers(1000, size=self.rng.integers(20, 61)).tolist()
        params = SamplingParams(max_tokens=most, stop_token_ids=[200_002, 200_012])
        client = int(self.rng.integers(CLIENTS))
        self.scheduler.add_request(Request(name, prompt, params, pooling_params=None, client_index=client))

    def fill(self) -> None:
        while len(self.scheduler.requests) < self.count:
            self.add(int(self.rng.integers(1, 385)) if self.changing else LONGEST - 100)

    def step(self, encoder: Any) -> tuple[float, ...]:
        """Seconds of each part."""
        from vllm.v1.outputs import ModelRunnerOutput

        if self.changing:
            self.fill()
        marks = [time.perf_counter()]
        self.under_way.append(self.scheduler.schedule())
        marks.append(time.perf_counter())
        if len(self.under_way) < len(PARTS) - 1:
            return (0.0,) * len(PARTS)
        plan = self.under_way.pop(0)
        names = list(plan.num_scheduled_tokens)
        reading = [name in self.scheduler.requests and self.scheduler.requests[name].is_prefill_chunk for name in names]
        output = ModelRunnerOutput(
            names, {name: at for at, name in enumerate(names)}, [[] if reads else [7] for reads in reading]
        )
        began = time.perf_counter()
        said = self.scheduler.update_from_output(plan, output)
        marks.append(time.perf_counter())
        for message in said.values():
            encoder.encode_into(message, bytearray())
        marks.append(time.perf_counter())
        return marks[1] - marks[0], marks[2] - began, marks[3] - marks[2]


def scheduler(config: Any, kind: type, blocks: int = BLOCKS) -> Any:
    """One as the engine's core makes it, for gpt-oss's two groups of layers."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.structured_output import StructuredOutputManager

    same: Any = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
    groups = [
        KVCacheGroupSpec(["a"], SlidingWindowSpec(sliding_window=128, **same)),
        KVCacheGroupSpec(["b"], FullAttentionSpec(**same)),
    ]
    config.cache_config.num_gpu_blocks = blocks
    made = kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        include_finished_set=True,
        log_stats=True,
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )
    made.use_v2_model_runner = True  # a CPU has the other one
    if hasattr(made, "_is_plain"):
        made.has_short_way = made._is_plain()
    return made


def measure(count: int, changing: bool, turns: int = 12, steps: int = 16) -> list[dict[str, Any]]:
    """A row of each scheduler: medians in µs a step."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.serial_utils import MsgpackEncoder

    from vllm_gptoss.engine.runner.scheduler import GptOssScheduler

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model_config(shapes.TINY)))
        config = EngineArgs(
            model=folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=LONGEST, max_num_seqs=count,
            max_num_batched_tokens=8192, enable_prefix_caching=False, enforce_eager=True,
        ).create_engine_config()  # fmt: skip
    kinds = {VLLM: AsyncScheduler, PLUGIN: GptOssScheduler}
    made = {name: Planned(scheduler(config, kind), count, changing) for name, kind in kinds.items()}
    encoder = MsgpackEncoder()
    for one in made.values():
        one.fill()
        for _ in range(count * 60 // 8192 + 20):
            one.step(encoder)
    gc.collect()
    gc.freeze()  # as the engine's process does
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in made}
    for _ in range(turns):
        for name, one in made.items():
            taken[name] += [one.step(encoder) for _ in range(steps)]
    gc.unfreeze()
    return [
        {
            "scheduler": name,
            "requests": count,
            "changing": changing,
            **{part: round(1e6 * statistics.median(each[at] for each in found), 1) for at, part in enumerate(PARTS)},
        }
        for name, found in taken.items()
    ]


if __name__ == "__main__":
    for size in map(int, sys.argv[1:] or (1, 8, 64, 256)):
        for is_changing in (False, True):
            for row in measure(size, is_changing):
                print(json.dumps(row))
