"""FlashAttention 3's plan, made once per step: for the right window, never for a graph that was captured without it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder

from tests.support.plans import Common, builder
from vllm_gptoss.engine.attention import sm90

pytestmark = pytest.mark.vllm


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Common, bool]]:
    """What reached upstream's builder: the batch and `fast_build`."""
    calls: list[tuple[Common, bool]] = []
    monkeypatch.setattr(
        FlashAttentionMetadataBuilder, "build", lambda self, prefix, common, fast: calls.append((common, fast))
    )
    return calls


@pytest.fixture
def built(given: list[tuple[Common, bool]]) -> Callable[[], list[bool]]:
    return lambda: [fast for _, fast in given]


@pytest.mark.parametrize("window", [(-1, -1), (127, 0)])
def test_a_group_plans_for_the_window_of_its_own_layers(
    built: Callable[[], list[bool]], window: tuple[int, int]
) -> None:
    of = builder(window, window)
    of.build(0, Common(num_actual_tokens=17))
    assert of.aot_sliding_window == window
    assert built() == [False]


def test_a_group_of_both_windows_is_left_to_upstream(built: Callable[[], list[bool]]) -> None:
    of = builder((-1, -1), (127, 0))
    of.build(0, Common(num_actual_tokens=17))
    assert of.aot_sliding_window is None


@pytest.mark.parametrize(("tokens", "fast"), [(1, True), (16, True), (17, False)])
def test_steps_of_few_tokens_get_no_plan(built: Callable[[], list[bool]], tokens: int, fast: bool) -> None:
    builder((-1, -1)).build(0, Common(num_actual_tokens=tokens))
    assert built() == [fast]


def test_a_draft_gets_no_plan_either_way(built: Callable[[], list[bool]]) -> None:
    builder((-1, -1)).build(0, Common(num_actual_tokens=500), fast_build=True)
    assert built() == [True]


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_step_is_planned_as_the_graph_was_captured(
    given: list[tuple[Common, bool]], mode: CUDAGraphMode, drafts: int
) -> None:
    """A capture sets the maximum sequence length, and the maximum query length if a request has several tokens. A step
    of short sequences, or of one token each, once had a plan with a different layout. FA3 then read outside the plan,
    and answers were wrong (450 memorized answers, on an H100)."""
    of = builder((127, 0), mode=mode, drafts=drafts)
    captured = 1 if mode.separate_routine() and not drafts else 1 + drafts if mode.separate_routine() else 64
    for common in (Common(64, captured, 4096), Common(64, 1, 90), Common(64, min(captured, 2), 4000)):
        of.build(0, common)
    seen = {(common.max_seq_len, common.max_query_len > 1) for common, _ in given}
    assert seen == {(4096, captured > 1)}


@pytest.mark.parametrize(
    ("mode", "tokens"), [(CUDAGraphMode.FULL, 65), (CUDAGraphMode.PIECEWISE, 64), (CUDAGraphMode.NONE, 64)]
)
def test_a_step_that_no_graph_replays_is_planned_as_it_is(
    given: list[tuple[Common, bool]], mode: CUDAGraphMode, tokens: int
) -> None:
    builder((127, 0), mode=mode).build(0, Common(tokens, 7, 90))
    assert [common for common, _ in given] == [Common(tokens, 7, 90)]


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
