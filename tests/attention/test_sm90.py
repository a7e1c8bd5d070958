"""FlashAttention 3's plan, made once per step: for the right window, never for a graph that was captured without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder

from vllm_gptoss.attention import sm90


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """`fast_build` of every call that reached upstream's builder."""
    calls: list[bool] = []
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", lambda self, prefix, common, fast: calls.append(fast))
    return calls


def builder(*windows: tuple[int, int]) -> Any:
    of = object.__new__(sm90.GptOssFlashAttentionBackend.get_builder_cls())
    layers = {str(index): SimpleNamespace(impl=SimpleNamespace(sliding_window=w)) for index, w in enumerate(windows)}
    of.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    of.layer_names, of.aot_sliding_window = list(layers), None
    return of


@pytest.mark.parametrize("window", [(-1, -1), (127, 0)])
def test_a_group_plans_for_the_window_of_its_own_layers(built: list[bool], window: tuple[int, int]) -> None:
    of = builder(window, window)
    of.build(0, SimpleNamespace(num_actual_tokens=17))
    assert of.aot_sliding_window == window
    assert built == [False]


def test_a_group_of_both_windows_is_left_to_upstream(built: list[bool]) -> None:
    of = builder((-1, -1), (127, 0))
    of.build(0, SimpleNamespace(num_actual_tokens=17))
    assert of.aot_sliding_window is None


@pytest.mark.parametrize(("tokens", "fast"), [(1, True), (16, True), (17, False)])
def test_steps_of_few_tokens_get_no_plan(built: list[bool], tokens: int, fast: bool) -> None:
    builder((-1, -1)).build(0, SimpleNamespace(num_actual_tokens=tokens))
    assert built == [fast]


def test_a_draft_gets_no_plan_either_way(built: list[bool]) -> None:
    builder((-1, -1)).build(0, SimpleNamespace(num_actual_tokens=500), fast_build=True)
    assert built == [True]


def model(*backends: type) -> Any:
    layers = [SimpleNamespace(attn=SimpleNamespace(attn=SimpleNamespace(attn_backend=b))) for b in backends]
    return SimpleNamespace(model=SimpleNamespace(layers=[*layers, SimpleNamespace()]))  # a layer of another stage


class Other(FlashAttentionBackend):
    pass


@pytest.mark.parametrize(("version", "given"), [(3, True), (2, False), (None, False)])
def test_only_layers_that_vllm_built_for_flash_attention_3_get_it(
    monkeypatch: pytest.MonkeyPatch, version: int | None, given: bool
) -> None:
    monkeypatch.setattr(sm90.worker, "flash_attention_version", lambda: version)
    of = model(FlashAttentionBackend, Other)
    assert sm90.plan_once(of) is given
    first, second = (layer.attn.attn.attn_backend for layer in of.model.layers[:2])
    assert (first is not FlashAttentionBackend) is given
    assert issubclass(first, FlashAttentionBackend)
    assert first.get_name() == FlashAttentionBackend.get_name()
    assert second is Other
