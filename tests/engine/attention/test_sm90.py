"""FlashAttention 3's plan, made once per step: for the right window, never for a graph that was captured without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

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


FLASH_ATTN = AttentionBackendEnum.FLASH_ATTN


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> Callable[[], type]:
    """The class that vLLM's cached selection gives to a layer with sinks, where vLLM prefers FlashAttention 3."""
    monkeypatch.setattr(sm90.worker, "flash_attention_version", lambda: 3)
    monkeypatch.setattr(current_platform, "get_attn_backend_cls", lambda *_, **__: FLASH_ATTN.get_path(), raising=False)
    wanted = selector.AttentionSelectorConfig(64, torch.bfloat16, "auto", None, has_sink=True)
    return lambda: selector._cached_get_attn_backend(None, wanted)


def test_layers_built_meanwhile_get_it_and_no_others(selected: Callable[[], type]) -> None:
    """vLLM caches the class by configuration, and a model that is built before or after has the same one."""
    assert selected() is FlashAttentionBackend
    with sm90.registered():
        assert selected() is sm90.GptOssFlashAttentionBackend
        assert selected().get_name() == FlashAttentionBackend.get_name()
    assert selected() is FlashAttentionBackend
    with pytest.raises(ZeroDivisionError), sm90.registered():
        selected().get_name(1 / 0)
    assert selected() is FlashAttentionBackend


def test_the_class_of_another_plugin_stays(selected: Callable[[], type]) -> None:
    register_backend(FLASH_ATTN, f"{__name__}.{Other.__name__}")
    try:
        with sm90.registered():
            assert FLASH_ATTN.get_class() is Other
        assert FLASH_ATTN.get_class() is Other
    finally:
        FLASH_ATTN.clear_override()


class Other(FlashAttentionBackend):
    pass


@pytest.mark.parametrize("version", [2, None])
def test_without_flash_attention_3_nothing_is_registered(
    selected: Callable[[], type], monkeypatch: pytest.MonkeyPatch, version: int | None
) -> None:
    monkeypatch.setattr(sm90.worker, "flash_attention_version", lambda: version)
    with sm90.registered():
        assert selected() is FlashAttentionBackend
