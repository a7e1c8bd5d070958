"""What samples a replayed step is decided by the requests of that step."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_gptoss.engine.runner import captured_steps
from vllm_gptoss.engine.runner.batch import RING, Batch
from vllm_gptoss.engine.runner.graphs import Graphs
from vllm_gptoss.engine.runner.model_runner import ShortWay, Taken

pytestmark = pytest.mark.vllm

MOST = 32
WITH_TOP_K = (True, True, False, True, False, False)


class Sampler:
    """Records which rows it reads parameters of, as vLLM's sampler does on the host to select its kernels."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def sample(self, logits: Any, places: Any, also: Any, rows: Any, *rest: Any) -> tuple[torch.Tensor, None]:
        self.rows.append(rows.tolist())
        return torch.zeros(len(rows), dtype=torch.int64), None


def batch_of(*rows: int) -> Batch:
    """Requests with top-k in these rows of vLLM's states."""
    names, count = [f"of row {row}" for row in rows], len(rows)
    inputs: Any = SimpleNamespace(
        query_start_loc=torch.arange(count + 1),
        positions=torch.zeros(MOST, dtype=torch.int64),
        input_ids=torch.zeros(MOST, dtype=torch.int32),
        expanded_local_pos=torch.zeros(count, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.zeros(count, dtype=torch.int32),
    )
    return Batch(names, {name: at for at, name in enumerate(names)}, np.array(rows), None, WITH_TOP_K, inputs)


@pytest.fixture
def short_way(monkeypatch: pytest.MonkeyPatch) -> ShortWay:
    """One without a GPU: nothing is captured, vLLM's states are empty."""
    monkeypatch.setattr(captured_steps.vllm, "parts", lambda: SimpleNamespace(post_update=lambda *_: None))
    ring = torch.zeros(RING, MOST, dtype=torch.int64)
    gpu = SimpleNamespace(gpu=None)
    states = {"last_sampled_tokens": None, "draft_tokens": None}
    states |= dict.fromkeys(("num_computed_tokens", "all_token_ids", "total_len"), gpu)
    made: Any = object.__new__(ShortWay)
    made.runner = SimpleNamespace(
        model=SimpleNamespace(compute_logits=lambda hidden: hidden),
        req_states=SimpleNamespace(**states),
        sampler=SimpleNamespace(penalties_state=SimpleNamespace(output_bin_counts=None)),
        vocab_size=10,
    )
    made.buffers = SimpleNamespace(
        rows=torch.zeros(MOST, dtype=torch.int64),
        ones=torch.ones(MOST, dtype=torch.int32),
        zeros=torch.zeros(MOST, dtype=torch.int32),
        ring=SimpleNamespace(uva=lambda: ring, np=ring.numpy()),
        slot=torch.zeros(1, dtype=torch.int64),
        sampler=Sampler(),
    )
    made.graphs = object.__new__(Graphs)
    made.graphs.works = OrderedDict()
    made.events, made.turn = [SimpleNamespace(record=lambda: None)] * RING, 0
    return made  # type: ignore[no-any-return]


def test_each_batch_samples_by_what_its_own_requests_asked_for(short_way: ShortWay) -> None:
    """Once, the first batch of a size decided for all later batches of that size. Its rows then belonged to requests
    without sampling parameters, and top-k was not applied."""
    for rows in ((0, 5), (23, 7), (23, 9)):
        output = short_way.sample(Taken(batch_of(*rows), torch.zeros(2, 10), set()))
        assert output.req_ids == [f"of row {row}" for row in rows]
    sampler: Any = short_way.buffers.sampler
    assert sampler.rows == [[0, 5], [23, 7], [23, 9]]
    assert len(short_way.graphs.works) == 1
