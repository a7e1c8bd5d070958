"""Where our expert kernels end and vLLM's begin: a token too many would read past what a block has staged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gptoss.kernels import dense, experts, nvrtc
from vllm_gptoss.quantization import method


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which side each call of `apply_monolithic` took."""
    sides: list[str] = []
    monkeypatch.setattr(method.sm90, "apply", lambda *_: sides.append("ours"))
    upstream = method.GptOssExpertsMethod.__mro__[1]
    monkeypatch.setattr(upstream, "apply_monolithic", lambda *_: sides.append("upstream"))
    return sides


def projections() -> tuple[experts.Projection, experts.Projection]:
    """Up and down of 32 experts, hidden and intermediate 64."""

    def bytes_of(rows: int) -> experts.Projection:
        values, scales = torch.zeros(32, rows // 4, 128), torch.zeros(32, -(-rows // 256) * 8, 128)
        return experts.Projection(values.byte(), scales.byte(), torch.zeros(32, rows))

    return bytes_of(128), bytes_of(64)


def prepared(few: Any) -> method.GptOssExpertsMethod:
    of = method.GptOssExpertsMethod.__new__(method.GptOssExpertsMethod)
    object.__setattr__(of, "few", few)
    return of


@pytest.mark.parametrize(
    ("multiprocessors", "most"),
    [(132, 64), (114, 28), (78, 19)],
    ids=["H100 SXM and H200", "H100 PCIe", "the smallest sm90 part"],
)
def test_few_tokens_are_ours_and_the_rest_upstreams(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, multiprocessors: int, most: int
) -> None:
    monkeypatch.setattr(experts, "_multiprocessors", lambda device: multiprocessors)
    few = experts.FewTokenExperts(*projections(), 4, 32, alpha=1.0, limit=7.0)
    of = prepared(few)
    for tokens, side in ((0, "upstream"), (1, "ours"), (most, "ours"), (most + 1, "upstream"), (4096, "upstream")):
        of.apply_monolithic(None, torch.empty(tokens, 64), torch.empty(tokens, 32))
        assert ran.pop() == side, tokens


@pytest.mark.parametrize(("most", "made_for"), [(16, {32}), (64, {32, 64})])
def test_the_start_compiles_what_is_needed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, most: int, made_for: set[int]
) -> None:
    compiled: list[tuple[str, int]] = []

    def kernel(recipe: experts.Recipe) -> None:
        compiled.append((recipe.name, int(dict(recipe.options)["TOKENS"])))

    monkeypatch.setattr(experts, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(experts, "_kernel", kernel)
    monkeypatch.setattr(experts, "partial_sums", lambda device, width: None)
    few = experts.FewTokenExperts(*projections(), 4, 32, alpha=1.0, limit=7.0)
    few.compile(torch.bfloat16, most)
    assert {tokens for _, tokens in compiled} == made_for
    assert {name for name, _ in compiled} == {"experts_up", "experts_down"}


def test_nothing_of_ours_is_taken_while_upstream_lays_weights_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small tensor that lands in memory just freed keeps the next layer from taking it again."""
    steps: list[str] = []
    upstream = method.GptOssExpertsMethod.__mro__[1]
    monkeypatch.setattr(upstream, "process_weights_after_loading", lambda *_: steps.append("laid out"))
    monkeypatch.setattr(method.GptOssExpertsMethod, "_obstacle", lambda *_: None)
    monkeypatch.setattr(method.GptOssExpertsMethod, "_projection", lambda *_: None)
    for name in ("reserve", "sample", "prepare"):
        monkeypatch.setattr(method.sm90, name, lambda *_, name=name, **__: steps.append(name))
    of = prepared(None)
    object.__setattr__(of, "moe", SimpleNamespace(experts_per_token=4, num_experts=32))
    for name in ("w13_precision_config", "w2_precision_config"):
        object.__setattr__(of, name, None)
    weights = ("w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias")
    of.process_weights_after_loading(SimpleNamespace(expert_map=None, **{name: torch.zeros(1) for name in weights}))
    assert steps == ["reserve", "sample", "sample", "laid out", "prepare"]


def test_without_our_kernels_everything_is_upstreams(ran: list[str]) -> None:
    prepared(None).apply_monolithic(None, torch.empty(1, 64), torch.empty(1, 32))
    assert ran == ["upstream"]


def test_the_layers_never_hand_the_experts_more_than_they_take() -> None:
    assert dense.MAX_TOKENS <= 78 // 4
    assert method.FEW_TOKENS <= experts.MAX_TOKENS


def driver(status: int, value: int) -> Any:
    def attribute(to: Any, which: int, device: int) -> int:
        to._obj.value = value
        return status

    return SimpleNamespace(cuDeviceGetAttribute=attribute)


@pytest.mark.parametrize(("status", "value", "shared"), [(0, 1, True), (0, 0, False), (1, 1, False)])
def test_a_gpu_shared_by_mps_is_told_by_the_driver(
    monkeypatch: pytest.MonkeyPatch, status: int, value: int, shared: bool
) -> None:
    """Two kernels whose blocks wait for one another would wait for ever; an old driver's error is no yes."""
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver(status, value))
    assert nvrtc.shared_by_mps(0) is shared


def test_experts_under_mps_stay_upstreams_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver(0, 1))
    of = prepared(None)
    moe = SimpleNamespace(has_bias=True)
    for name, value in (("mxfp4_backend", method.Mxfp4MoeBackend.TRITON), ("moe", moe)):
        object.__setattr__(of, name, value)
    monkeypatch.setattr(method.GptOssExpertsMethod, "is_monolithic", True)
    layer = SimpleNamespace(apply_router_weight_on_input=False, w13_weight=torch.zeros(1))
    assert "MPS" in str(of._obstacle(layer))
