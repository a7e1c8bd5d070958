"""Blocks that requests got reach the tables that the graphs read."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_gptoss.engine.runner import batch


def table(rows: int, width: int, staged: list[tuple[int, int, list[int]]]) -> SimpleNamespace:
    """As vLLM's `StagedWriteTensor`: (row, start, ids) of each write."""
    made = SimpleNamespace(
        gpu=torch.zeros(rows, width, dtype=torch.int32),
        _staged_write_indices=[row for row, _, _ in staged],
        _staged_write_starts=[start for _, start, _ in staged],
        _staged_write_contents=[one for _, _, ids in staged for one in ids],
        cleared=False,
    )
    made.clear_staged_writes = lambda: setattr(made, "cleared", True)
    return made


@pytest.fixture(autouse=True)
def _pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # needs a GPU


def test_each_write_and_the_numbers_of_its_row_arrive() -> None:
    first = table(4, 10, [(2, 3, [77]), (0, 9, [78])])
    second = table(4, 6, [(2, 1, [80])])
    numbers = np.zeros((2, 4), dtype=np.int32)
    numbers[0, 2], numbers[0, 0], numbers[1, 2], numbers[1, 3] = 4, 10, 2, 5
    tables = SimpleNamespace(block_tables=[first, second], num_blocks=SimpleNamespace(np=numbers))
    held = torch.ones(2, 4, dtype=torch.int32)
    assert batch.write_blocks(tables, held, torch.device("cpu"))
    assert first.gpu.nonzero().tolist() == [[0, 9], [2, 3]]
    assert (first.gpu[0, 9], first.gpu[2, 3], second.gpu[2, 1]) == (78, 77, 80)
    assert held.tolist() == [[10, 1, 4, 1], [1, 1, 2, 1]], "rows without a write stay"
    assert first.cleared
    assert second.cleared


def test_a_table_without_writes_is_left_alone() -> None:
    tables = SimpleNamespace(
        block_tables=[table(2, 4, []), table(2, 4, [(1, 0, [9])])],
        num_blocks=SimpleNamespace(np=np.ones((2, 2), dtype=np.int32)),
    )
    assert batch.write_blocks(tables, torch.zeros(2, 2, dtype=torch.int32), torch.device("cpu"))
    assert tables.block_tables[1].gpu.tolist() == [[0, 0, 0, 0], [9, 0, 0, 0]]


def test_several_blocks_at_once_are_left_to_vllm() -> None:
    one = table(2, 4, [(1, 0, [9, 10])])
    tables = SimpleNamespace(block_tables=[one], num_blocks=SimpleNamespace(np=np.ones((1, 2), dtype=np.int32)))
    assert batch.write_blocks(tables, torch.zeros(1, 2, dtype=torch.int32), torch.device("cpu")) is False
    assert not one.cleared


def test_a_batch_of_drafts_has_as_many_tokens_of_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of three drafts, in a graph of three."""
    parts = SimpleNamespace(InputBatch=SimpleNamespace, UvaBuffer=lambda *_: None)
    monkeypatch.setattr(batch.vllm, "parts", lambda: parts)
    monkeypatch.setattr(batch.vllm, "marks_padding", lambda: True)
    most = 8
    inputs = SimpleNamespace(
        query_start_loc=torch.zeros(most + 1, dtype=torch.int32), is_padding=torch.zeros(32, dtype=torch.bool),
        seq_lens=torch.zeros(most), input_ids=torch.zeros(32), positions=torch.zeros(32),
    )  # fmt: skip
    computed = np.arange(most, dtype=np.int32) * 10
    lengths = SimpleNamespace(np=np.zeros(most, dtype=np.int32), gpu=torch.zeros(most))
    states = SimpleNamespace(
        req_id_to_index={"a": 5, "b": 2}, num_computed_tokens_np=computed, prefill_len=lengths
    )  # fmt: skip
    parameters = {name: SimpleNamespace(np=np.zeros(most), gpu=torch.zeros(most)) for name in batch.PARAMETERS}
    runner = SimpleNamespace(
        req_states=states, input_buffers=inputs, max_num_reqs=most, num_speculative_steps=3, device=None,
        block_tables=SimpleNamespace(num_blocks=SimpleNamespace(gpu=torch.zeros(1, most))),
        sampler=SimpleNamespace(sampling_states=SimpleNamespace(**parameters)),
    )  # fmt: skip
    buffers = batch.Buffers(runner)
    captured = buffers.sampler.sampling_states.top_p.gpu
    parameters["top_p"].gpu = torch.full((most,), 0.5)  # the next buffer of vLLM's pool
    made = batch.begin(runner, buffers, ["a", "b"], SimpleNamespace(num_reqs=3, num_tokens=12))
    buffers.fill(runner, made)
    made.count_tokens(computed)
    given = made.inputs
    assert made.sampling is None, "vLLM's rejection sampler"
    assert captured.tolist() == [0.5] * most, "what a graph reads"
    assert buffers.slot.tolist() == [0]
    assert given.decode_graph_eligible
    assert (given.num_tokens, given.num_draft_tokens, given.num_tokens_after_padding) == (8, 6, 12)
    assert given.query_start_loc.tolist() == given.query_start_loc_np.tolist() == [0, 4, 8, 8]
    assert given.cu_num_logits.tolist() == given.cu_num_logits_np.tolist() == [0, 4, 8]
    assert given.num_scheduled_tokens.tolist() == [4, 4]
    assert given.num_draft_tokens_per_req.tolist() == [3, 3]
    assert given.logits_indices.tolist() == list(range(8))
    assert given.expanded_idx_mapping.tolist() == [5] * 4 + [2] * 4
    assert given.expanded_local_pos.tolist() == [0, 1, 2, 3] * 2
    assert given.is_padding.tolist() == [False] * 8 + [True] * 4
    assert given.seq_lens_cpu_upper_bound.tolist() == [54, 24, 0]
