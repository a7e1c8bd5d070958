"""Which steps the fused path takes, and that all it needs is there before the first.

`tests/choose` has the obstacles.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gptoss.model import few_tokens


def test_a_step_outside_the_engine_or_of_many_tokens_is_not_taken() -> None:
    assert not few_tokens.FewTokens.could_take(few_tokens.MAX_TOKENS + 1)
    assert not few_tokens.FewTokens.could_take(1)  # there is no forward context here


def a_place() -> Any:
    """What `loads` reads of a 20b layer."""

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(1).expand(rows, columns)

    tensors = SimpleNamespace(
        qkv_weight=weight(5120, 2880),
        out_weight=weight(2880, 4096),
        router_weight=weight(32, 2880),
        active=4,
        window=0,
        experts=None,
    )
    return SimpleNamespace(tensors=tensors, attention=SimpleNamespace(num_kv_heads=8))


def test_every_kernel_of_the_path_is_compiled_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: set[Any] = set()
    monkeypatch.setattr(few_tokens.dense, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(few_tokens.dense, "kernel", lambda device, plan: compiled.add(plan))
    monkeypatch.setattr(few_tokens.attention, "kernel", lambda device, plan: compiled.add(plan))
    few_tokens.nvrtc.at_once(few_tokens.loads(a_place()))
    for tokens in range(1, few_tokens.MAX_TOKENS + 1):
        for mode, rows, columns, top_k in (
            (few_tokens.dense.Mode.QKV, 5120, 2880, 0),
            (few_tokens.dense.Mode.OUT, 2880, 4096, 0),
            (few_tokens.dense.Mode.ROUTER, 32, 2880, 4),
        ):
            assert few_tokens.dense.plan(mode, rows, columns, tokens, 132, top_k) in compiled
        assert few_tokens.attention.plan(tokens, 8, 0) in compiled
