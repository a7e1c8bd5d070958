"""When a step of one token is one launch, and the logged reason otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.vllm_log import heard
from vllm_gptoss._vllm import worker
from vllm_gptoss.engine.choose import Deployment
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.kernels import nvrtc, step
from vllm_gptoss.engine.kernels.experts import Projection
from vllm_gptoss.engine.kernels.layer import LayerTensors
from vllm_gptoss.engine.model import addresses, fused_path, one_token
from vllm_gptoss.engine.model.layer_binding import Place
from vllm_gptoss.engine.spec import GPT_OSS_20B, SWIGLU_ALPHA, SWIGLU_LIMIT

COS_SIN = torch.zeros(8, 64)
H200 = Device("nvidia", "NVIDIA H200", "sm90", 139.8)


def projection(experts: int, rows: int, columns: int) -> Projection:
    """As large as the 20b's, but for the memory."""
    values = torch.empty(1, dtype=torch.uint8).expand(experts, rows // 4, columns * 2)
    scales = torch.empty(1, dtype=torch.uint8).expand(experts, -(-rows // 256) * 8, 46 * 64)
    return Projection(values, scales, torch.empty(1).expand(experts, rows))


def place(name: str = "layers.0", window: int = 128, cache: torch.Tensor | None = None) -> Place:
    """One layer of the 20b."""
    tensors = LayerTensors(
        norm=torch.zeros(2880),
        qkv_weight=torch.empty(1).expand(5120, 2880),
        qkv_bias=torch.zeros(5120),
        cos_sin=COS_SIN,
        sinks=torch.zeros(64),
        window=window,
        out_weight=torch.empty(1).expand(2880, 4096),
        out_bias=torch.zeros(2880),
        post_norm=torch.zeros(2880),
        router_weight=torch.zeros(32, 2880),
        router_bias=torch.zeros(32),
        active=4,
        experts=SimpleNamespace(  # type: ignore[arg-type]
            active=4, expert_map=None, up=projection(32, 5760, 2880), down=projection(32, 2880, 2880),
            alpha=SWIGLU_ALPHA, limit=SWIGLU_LIMIT,
        ),
    )  # fmt: skip
    cache = torch.zeros(4, 8, 16, 128, dtype=torch.bfloat16) if cache is None else cache
    return Place(name, tensors, SimpleNamespace(kv_cache=cache), None)


ONE_GPU = Deployment(GPT_OSS_20B, own_experts=True, one_rotary_cache=True, auxiliary_states=False)


def test_the_20b_is_the_shape_that_the_kernel_is_asked_for() -> None:
    shape = one_token.OneToken([place(), place(window=0)]).step.shape
    assert shape == step.Shape(2, 2880, 64, 2880, 32, (46, 46))
    assert step.unsupported(shape) is None


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log lines of vLLM's logger."""
    with heard(caplog, logging.INFO):
        yield caplog


def test_what_keeps_six_launches_is_one_line(said: pytest.LogCaptureFixture) -> None:
    assert one_token.build([place()], replace(ONE_GPU, auxiliary_states=True)) is None
    assert "six launches each for one token too" in said.text
    assert "a draft model reads states between layers" in said.text


def test_a_kernel_that_cannot_be_compiled_is_one_line(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise nvrtc.NvrtcError("libnvrtc was not found")

    monkeypatch.setattr(step, "compile_for", refuse)
    assert one_token.build([place(), place()], ONE_GPU) is None
    assert "six launches each for one token too (the kernel cannot be compiled: libnvrtc was not found)" in said.text


class Recorded(one_token.OneToken):
    """The path that never finds a table, and its requests."""

    def __init__(self, places: list[Place]) -> None:
        super().__init__(places)
        self.asked: list[tuple[list[int], list[int]]] = []
        self.step.table = self.table  # type: ignore[method-assign]

    def table(self, groups: Any, caches: Any) -> None:
        self.asked.append((list(groups), [cache.data_ptr() for cache in caches]))


def test_a_rank_stores_into_each_peer_where_that_one_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Third of four ranks: `push.others` are the addresses as this process maps them, in the order of the ranks."""
    given: list[Any] = []
    module = SimpleNamespace(kernel=lambda *_: lambda grid, threads, arguments: given.extend(arguments))
    monkeypatch.setattr(step.nvrtc, "load", lambda *_: module)
    monkeypatch.setattr(step, "multiprocessors", lambda device: 132)
    path = one_token.OneToken([place(), place(window=0)], ranks=4)
    path.join(SimpleNamespace(rank=2, others=[100, 101, 102, 103]))  # type: ignore[arg-type]
    row, requests = torch.zeros(1, 2880), place().requests(context(1))
    path.step(row, None, torch.zeros(1), [requests], torch.zeros(1))
    (args,) = given
    assert (args.rank, args.received, list(args.peers)) == (2, 102, [103, 100, 101, 0, 0, 0, 0])


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
    path = Recorded([place(f"layers.{i}") for i in range(4)])
    assert path(torch.zeros(1, 2880), None, torch.zeros(1), context(2)) is None, "no table: six launches"
    assert path.asked[0][0] == [0, 1, 0, 1]


def test_a_cache_that_vllm_makes_anew_is_the_one_that_is_read() -> None:
    """vLLM profiles its graphs with a cache of a few blocks, gives it up and makes the real one."""
    only = place(cache=torch.zeros(1, 8, 16, 128))
    path = Recorded([only])
    for _ in range(2):
        path(torch.zeros(1, 2880), None, torch.zeros(1), context(1))
        assert path.asked[-1][1] == [only.attention.kv_cache.data_ptr()]
        only.attention.kv_cache = torch.zeros(9, 8, 16, 128)
    assert path.asked[0][1] != path.asked[1][1]


@pytest.mark.parametrize("runs", [True, False])
def test_a_connector_hears_of_every_layer_around_the_one_launch_and_of_none_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    """The six launches notify the connector themselves: waiting twice for a layer is an error."""
    told: list[str] = []
    connector = SimpleNamespace(
        wait_for_layer_load=lambda name: told.append(f"wait {name}"),
        save_kv_layer=lambda name, cache, metadata: told.append(f"save {name}"),
    )
    monkeypatch.setattr(worker, "kv_connector", lambda: connector)
    path = one_token.OneToken([place("layers.0"), place("layers.1")])

    class Launch:
        def table(self, *_: Any) -> int | None:
            return 1 if runs else None

        def __call__(self, *_: Any) -> tuple[str, str]:
            told.append("launch")
            return "x", "residual"

    path.step = Launch()  # type: ignore[assignment]
    found = path(torch.zeros(1, 2880), None, torch.zeros(1), context(1))
    assert (found is not None) is runs
    whole = ["wait layers.0", "wait layers.1", "launch", "save layers.0", "save layers.1"]
    assert told == (whole if runs else [])


def test_more_kinds_of_tables_than_the_kernel_takes_keep_six_launches_and_say_so_once(
    said: pytest.LogCaptureFixture,
) -> None:
    path = Recorded([place(f"layers.{i}") for i in range(8)])
    for _ in range(2):
        assert path(torch.zeros(1, 2880), None, torch.zeros(1), context(step.MAX_GROUPS + 1)) is None
    assert path.asked == []
    lines = {id(record) for record in said.records if "one token (5 kinds of caches" in record.getMessage()}
    assert len(lines) == 1


@pytest.mark.parametrize(("tokens", "taken"), [(1, True), (2, False)])
def test_only_steps_of_one_token_are_one_launch(tokens: int, taken: bool) -> None:
    calls = []
    model = SimpleNamespace(start_layer=0, _maybe_add_hidden_state=lambda aux, index, x, residual: aux)
    path = fused_path.FusedPath(SimpleNamespace(model=model), ONE_GPU)
    path.places = [place()]
    path.one_token = lambda *_: (calls.append("one"), (torch.ones(1), torch.ones(1)))[1]  # type: ignore[assignment, func-returns-value]
    path._layer = lambda *_: (calls.append("six"), (torch.ones(1), torch.ones(1)))[1]  # type: ignore[method-assign, func-returns-value]
    path._all_layers(torch.zeros(tokens, 4), None, torch.zeros(tokens), None)
    assert calls == ["one" if taken else "six"]


@pytest.mark.parametrize("auxiliary", [(), (2, 18, 33)])
def test_one_launch_is_taken_unless_a_draft_reads_between_layers(
    monkeypatch: pytest.MonkeyPatch, auxiliary: tuple[int, ...]
) -> None:
    """EAGLE3's auxiliary states lie where one launch cannot be looked into."""
    monkeypatch.setattr(fused_path.device, "detect", lambda: H200)
    monkeypatch.setattr(one_token.device, "detect", lambda: H200)
    monkeypatch.setattr(fused_path.worker, "tensor_parallel_rank", lambda: 0)
    monkeypatch.setattr(fused_path.nvrtc, "at_once", lambda loads: None)
    monkeypatch.setattr(addresses, "look_up", lambda found, rank: place())
    monkeypatch.setattr(one_token.step, "compile_for", lambda shape, device: None)
    model = SimpleNamespace(layers=[None, None], start_layer=0, end_layer=2, aux_hidden_state_layers=auxiliary)
    path = fused_path.FusedPath(SimpleNamespace(model=model), Deployment(GPT_OSS_20B))
    assert path.prepare("auto").value == "gptoss"
    assert (path.one_token is None) == bool(auxiliary)
