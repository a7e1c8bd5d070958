"""What vLLM keeps of requests that decode is as its own runner would keep it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_gptoss.engine.runner.model_runner import ShortWay

pytestmark = pytest.mark.vllm
ROWS = 12


def runner(names: list[str], rng: random.Random) -> Any:
    """The states of `names` and of unused rows, and a list for new blocks."""
    rows = rng.sample(range(ROWS), len(names))
    states = SimpleNamespace(
        req_id_to_index=dict(zip(names, rows, strict=True)),
        num_computed_tokens_np=np.array([rng.randrange(40) for _ in range(ROWS)], dtype=np.int32),
        num_computed_prefill_tokens=np.zeros(ROWS, dtype=np.int32),
        prefill_len=SimpleNamespace(np=np.array([rng.randrange(1, 40) for _ in range(ROWS)], dtype=np.int32)),
    )
    blocks: list[Any] = []

    def append(row: int, new: Any, overwrite: bool) -> None:
        blocks.append((row, new, overwrite))

    return SimpleNamespace(req_states=states, block_tables=SimpleNamespace(append_block_ids=append), blocks=blocks)


def kept(made: Any) -> Any:
    states = made.req_states
    return states.num_computed_tokens_np.tolist(), states.num_computed_prefill_tokens.tolist(), made.blocks


@pytest.mark.parametrize("seed", range(5))
def test_as_its_own_function_does(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"r{at}" for at in range(rng.randint(1, ROWS))]
    theirs, ours = (runner(names, random.Random(seed)) for _ in range(2))
    step = SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names,
            num_computed_tokens=[rng.randrange(40, 90) for _ in names],
            new_block_ids=[rng.choice([None, None, ([3], [4])]) for _ in names],
        ),
        new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
    )
    GPUModelRunner.update_requests(theirs, step)
    rows = np.array([ours.req_states.req_id_to_index[name] for name in names])
    grew = any(step.scheduled_cached_reqs.new_block_ids)
    ShortWay._update(SimpleNamespace(runner=ours), step, SimpleNamespace(rows=rows), grew)  # type: ignore[arg-type]
    assert kept(ours) == kept(theirs)


def test_blocks_to_zero_or_copy_are_its_own() -> None:
    asked: list[Any] = []
    made = SimpleNamespace(update_requests=asked.append)
    step = SimpleNamespace(scheduled_cached_reqs=None, new_block_ids_to_zero=[4], kv_cache_block_copies=None)
    ShortWay._update(SimpleNamespace(runner=made), step, SimpleNamespace(rows=None), False)  # type: ignore[arg-type]
    assert asked == [step]
