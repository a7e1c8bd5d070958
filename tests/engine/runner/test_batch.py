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
    assert not batch.write_blocks(tables, torch.zeros(1, 2, dtype=torch.int32), torch.device("cpu"))
    assert not one.cleared
