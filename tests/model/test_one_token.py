"""When a step of one token is one launch, and that it says why where it is not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gptoss.kernels import nvrtc, step
from vllm_gptoss.kernels.experts import Projection
from vllm_gptoss.model import few_tokens, one_token

COS_SIN = torch.zeros(8, 64)


def config(**parallel: int) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{"tensor_parallel_size": 1, "pipeline_parallel_size": 1} | parallel)
    )


def projection(experts: int, rows: int, columns: int) -> Projection:
    """As large as the 20b's, but for the memory."""
    values = torch.empty(1, dtype=torch.uint8).expand(experts, rows // 4, columns * 2)
    scales = torch.empty(1, dtype=torch.uint8).expand(experts, -(-rows // 256) * 8, 46 * 64)
    return Projection(values, scales, torch.empty(1).expand(experts, rows))


def layer(**changes: Any) -> Any:
    """What is read of one layer of the 20b."""
    experts = SimpleNamespace(active=4, expert_map=None, up=projection(32, 5760, 2880), down=projection(32, 2880, 2880))
    attn = SimpleNamespace(kv_cache=torch.zeros(4, 8, 16, 128, dtype=torch.bfloat16))
    fields = {
        "name": "layers.0",
        "block": SimpleNamespace(attn=attn),
        "norm": torch.zeros(2880),
        "post_norm": torch.zeros(2880),
        "qkv_weight": torch.empty(1).expand(5120, 2880),
        "qkv_bias": torch.zeros(5120),
        "out_weight": torch.empty(1).expand(2880, 4096),
        "out_bias": torch.zeros(2880),
        "gate_weight": torch.zeros(32, 2880),
        "gate_bias": torch.zeros(32),
        "cos_sin": COS_SIN,
        "sinks": torch.zeros(64),
        "window": 128,
        "experts": experts,
    }
    return SimpleNamespace(**{**fields, **changes})


def test_the_20b_on_one_gpu_has_no_obstacle() -> None:
    layers = [layer(), layer(window=0)]
    assert one_token.obstacle(layers, config()) is None
    shape = one_token.OneToken(layers).step.shape
    assert shape == step.Shape(2, 2880, 64, 2880, 32, (46, 46))
    assert step.unsupported(shape) is None


def test_states_that_a_draft_reads_keep_six_launches() -> None:
    assert "draft model" in str(one_token.obstacle([layer(), layer()], config(), auxiliary=(2, 18, 33)))


SMALL_BLOCKS = SimpleNamespace(attn=SimpleNamespace(kv_cache=torch.zeros(4, 8, 8, 128)))


@pytest.mark.parametrize(
    ("changes", "parallel", "why"),
    [
        ({}, {"tensor_parallel_size": 2}, "several GPUs"),
        ({}, {"pipeline_parallel_size": 2}, "several GPUs"),
        ({"experts": None}, {}, "another backend"),
        ({"experts": SimpleNamespace(expert_map=torch.zeros(32), active=4)}, {}, "mapped"),
        ({"experts": SimpleNamespace(expert_map=None, active=2)}, {}, "not four"),
        ({"cos_sin": torch.zeros(8, 64)}, {}, "rotary caches of their own"),
        ({"block": SMALL_BLOCKS}, {}, "cache blocks of 8 tokens"),
    ],
)
def test_what_keeps_six_launches_is_named(changes: dict[str, Any], parallel: dict[str, int], why: str) -> None:
    assert why in str(one_token.obstacle([layer(), layer(**changes)], config(**parallel)))


def test_a_kernel_that_cannot_be_compiled_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise nvrtc.NvrtcError("libnvrtc was not found")

    monkeypatch.setattr(step, "compile_for", refuse)
    logging.getLogger("vllm").addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger="vllm"):
        assert one_token.build([layer(), layer()], config()) is None
    logging.getLogger("vllm").removeHandler(caplog.handler)
    assert "six launches each for one token too (the kernel cannot be compiled: libnvrtc was not found)" in caplog.text


class Recorded(one_token.OneToken):
    """The path that never finds a table, and what it asked for."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers)
        self.asked: list[tuple[list[int], list[int]]] = []
        self.step.table = self.table  # type: ignore[method-assign]

    def table(self, groups: Any, caches: Any) -> None:
        self.asked.append((list(groups), [cache.data_ptr() for cache in caches]))


def metadata(rows: int) -> Any:
    return SimpleNamespace(
        block_table=torch.zeros(1, rows, dtype=torch.int32),
        seq_lens=torch.ones(1, dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
    )


def context(kinds: int) -> Any:
    """Layers 0, 1, 2, … with `kinds` kinds of attention metadata in turn."""
    made = [(metadata(4), torch.zeros(1, dtype=torch.int64)) for _ in range(kinds)]
    return SimpleNamespace(
        attn_metadata={f"layers.{i}": made[i % kinds][0] for i in range(8)},
        slot_mapping={f"layers.{i}": made[i % kinds][1] for i in range(8)},
    )


def test_layers_are_grouped_by_their_tables() -> None:
    path = Recorded([layer(name=f"layers.{i}") for i in range(4)])
    assert path(torch.zeros(1, 2880), None, torch.zeros(1), context(2)) is None, "no table: six launches"
    assert path.asked[0][0] == [0, 1, 0, 1]


def test_a_cache_that_vllm_makes_anew_is_the_one_that_is_read() -> None:
    """vLLM profiles its graphs with a cache of a few blocks, gives it up and makes the real one."""
    only = layer(block=SimpleNamespace(attn=SimpleNamespace(kv_cache=torch.zeros(1, 8, 16, 128))))
    path = Recorded([only])
    for _ in range(2):
        path(torch.zeros(1, 2880), None, torch.zeros(1), context(1))
        assert path.asked[-1][1] == [only.block.attn.kv_cache.data_ptr()]
        only.block.attn.kv_cache = torch.zeros(9, 8, 16, 128)
    assert path.asked[0][1] != path.asked[1][1]


def test_more_kinds_of_tables_than_the_kernel_takes_keep_six_launches_and_say_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = Recorded([layer(name=f"layers.{i}") for i in range(8)])
    logging.getLogger("vllm").addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger="vllm"):
        for _ in range(2):
            assert path(torch.zeros(1, 2880), None, torch.zeros(1), context(step.MAX_GROUPS + 1)) is None
    logging.getLogger("vllm").removeHandler(caplog.handler)
    assert path.asked == []
    said = {id(record) for record in caplog.records if "one token (5 kinds of caches" in record.getMessage()}
    assert len(said) == 1


@pytest.mark.parametrize(("tokens", "taken"), [(1, True), (2, False)])
def test_only_steps_of_one_token_are_one_launch(tokens: int, taken: bool) -> None:
    calls = []
    model = SimpleNamespace(start_layer=0, _maybe_add_hidden_state=lambda aux, index, x, residual: aux)
    path = few_tokens.FewTokens(SimpleNamespace(model=model), config())
    path.layers = [layer()]
    path.one_token = lambda *_: (calls.append("one"), (torch.ones(1), torch.ones(1)))[1]  # type: ignore[assignment, func-returns-value]
    path._layer = lambda *_: (calls.append("six"), (torch.ones(1), torch.ones(1)))[1]  # type: ignore[method-assign, func-returns-value]
    path._all_layers(torch.zeros(tokens, 4), None, torch.zeros(tokens), None)
    assert calls == ["one" if taken else "six"]


@pytest.mark.parametrize("auxiliary", [(), (2, 18, 33)])
def test_one_launch_is_taken_unless_a_draft_reads_between_layers(
    monkeypatch: pytest.MonkeyPatch, auxiliary: tuple[int, ...]
) -> None:
    """EAGLE3's auxiliary states lie where one launch cannot be looked into."""
    monkeypatch.setattr(few_tokens, "_cache_obstacle", lambda layer: None)
    monkeypatch.setattr(few_tokens, "_compile", lambda layers: None)
    monkeypatch.setattr(one_token.step, "compile_for", lambda shape, device: None)
    model = SimpleNamespace(layers=[], start_layer=0, end_layer=0, aux_hidden_state_layers=auxiliary)
    path = few_tokens.FewTokens(SimpleNamespace(model=model), config())
    monkeypatch.setattr(path, "_look_up", lambda found: layer())
    model.layers, model.end_layer = [None, None], 2
    path._prepare()
    assert (path.one_token is None) == bool(auxiliary)
