"""Which steps our kernel takes from vLLM's Triton attention, and that the others, and every fault, leave it vLLM's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from tests.support.vllm_log import lines
from vllm_gptoss.engine.attention import decode, sm80
from vllm_gptoss.engine.choose import device
from vllm_gptoss.engine.kernels import attention_many, nvrtc

pytestmark = pytest.mark.vllm
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def l40s(said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An L40S. vLLM's attention answers with its name."""
    there = device.Device("nvidia", "NVIDIA L40S", "sm89", 44.4)
    monkeypatch.setattr(device, "detect", lambda: there)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(TritonAttentionImpl, "forward", lambda *_: "upstream")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Kernels that were compiled: architecture and window. Steps that the kernel ran: its plan and their tokens."""
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(attention_many, "load", lambda _, heads, window, of, arch: calls.append((arch, window)))
    monkeypatch.setattr(attention_many, "attend", lambda q, *rest: calls.append((rest[-1], len(q))))
    return calls


def layers(*windows: int | None, **other: Any) -> list[Any]:
    """vLLM's `Attention` of as many layers, built while our backend is registered."""
    given = {"sinks": torch.zeros(64, dtype=BF16), "kv_cache_dtype": "auto", **other}
    with sm80.registered():
        backend: Any = AttentionBackendEnum.TRITON_ATTN.get_class()
    of = [backend.get_impl_cls()(64, 64, 0.125, 8, None, window, **given) for window in windows]
    return [SimpleNamespace(attn_backend=backend, dtype=BF16, impl=impl) for impl in of]


def model(attention: list[Any]) -> Any:
    of = [SimpleNamespace(attn=SimpleNamespace(attn=layer)) for layer in attention]
    return SimpleNamespace(model=SimpleNamespace(layers=of))


def step(layer: Any, tokens: int, longest: int = 1, block: int = 16, **other: Any) -> Any:
    """What a layer answers to a step."""
    rows = torch.zeros(tokens, 64, 64, dtype=BF16)
    metadata = SimpleNamespace(
        num_actual_tokens=tokens, max_query_len=longest, causal=True, block_table=None, seq_lens=None,
        query_start_loc=None,
    )  # fmt: skip
    cache = torch.zeros(2, 8, block, 128, dtype=BF16)
    given = {"metadata": metadata, "scale": None, **other}
    return layer.impl.forward(None, rows, None, None, cache, given["metadata"], rows, given["scale"])


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(
    ("tokens", "longest", "ours"),
    [(1, 1, True), (16, 1, True), (64, 1, True), (512, 1, True), (513, 1, False), (1, 2, False), (8, 8, False)],
)
def test_steps_of_one_token_a_request_are_ours(
    ran: list[tuple[str, Any]], tokens: int, longest: int, ours: bool, window: int | None
) -> None:
    (layer,) = layers(window)
    assert step(layer, tokens, longest) == "upstream", "nothing is compiled yet"
    assert decode.set_up(model([layer]))
    answer = step(layer, tokens, longest)
    plan = attention_many.plan(tokens, window or 0, arch="sm_89")
    assert ran == [("sm_89", window or 0), *([(plan, tokens)] if ours else [])]
    assert isinstance(answer, torch.Tensor) is ours


def test_another_gpu_that_counts_as_this_one_gets_ptx(
    ran: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    decode.set_up(model(layers(None, 128)))
    assert sorted(ran) == [("compute_89", 0), ("compute_89", 128)]


def test_steps_that_are_not_plain_are_vllms(ran: list[tuple[str, Any]], said: pytest.LogCaptureFixture) -> None:
    (layer,) = layers(None)
    decode.set_up(model([layer]))
    ran.clear()
    assert step(layer, 1, metadata=None) == "upstream"  # profiling
    assert step(layer, 1, scale=torch.ones(1)) == "upstream"
    assert (ran, lines(said)) == ([], [])
    assert isinstance(step(layer, 1), torch.Tensor), "neither is a fault"


def broken(*_: Any) -> None:
    raise nvrtc.NvrtcError("refused")


@pytest.mark.parametrize(
    ("fault", "block", "why"),
    [
        ("load", 16, "NvrtcError: refused"),
        ("attend", 16, "NvrtcError: refused"),
        ("", 48, "cache blocks of 48 tokens, not a power of two from 16 on"),
    ],
)
def test_a_fault_leaves_the_layer_to_vllm_with_one_line(
    ran: list[tuple[str, Any]], said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fault: str, block: int,
    why: str,
) -> None:  # fmt: skip
    if fault:
        monkeypatch.setattr(attention_many, fault, broken)
    (layer,) = layers(None)
    assert decode.set_up(model([layer]))
    assert [step(layer, 8, block=block) for _ in range(2)] == ["upstream"] * 2
    assert lines(said) == [f"attention: upstream from here on ({why})"]


@pytest.mark.parametrize("other", [{"sinks": None}, {"logits_soft_cap": 30.0}, {"attn_type": "encoder"}])
def test_attention_that_the_kernel_does_not_compute_is_vllms(ran: list[tuple[str, Any]], other: dict[str, Any]) -> None:
    (layer,) = layers(None, **other)
    assert decode.set_up(model([layer]))
    assert step(layer, 8) == "upstream"
    assert not ran


def test_only_layers_built_meanwhile_get_it() -> None:
    triton = AttentionBackendEnum.TRITON_ATTN
    assert triton.get_class() is TritonAttentionBackend
    with sm80.registered():
        ours = triton.get_class()
        assert ours.get_name() == "TRITON_ATTN"
        assert ours.get_builder_cls() is TritonAttentionBackend.get_builder_cls()
        assert AttentionBackendEnum.FLASH_ATTN.get_class().__module__.startswith("vllm.")
    assert triton.get_class() is TritonAttentionBackend
    stock = SimpleNamespace(attn_backend=TritonAttentionBackend)
    assert not decode.set_up(model([stock]))
