"""Kernels compiled beside loading: the calls equal the later ones, allocate nothing, and never end a start."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gptoss.engine.choose import bands
from vllm_gptoss.engine.choose.deployment import Deployment
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.experts import mxfp4, sm90
from vllm_gptoss.engine.kernels import cache, experts, experts_prefill, nvrtc, step
from vllm_gptoss.engine.kernels.experts import CompileJob, Projection
from vllm_gptoss.engine.model import early
from vllm_gptoss.engine.spec import GPT_OSS_20B

SMALL = replace(GPT_OSS_20B, experts=2)


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early.device, "detect", lambda: Device("nvidia", "H200", "sm90", 141))
    for module in (experts, experts_prefill):
        monkeypatch.setattr(module, "multiprocessors", lambda index: 132)


def a_model(index: int = 0, is_ours: bool = True) -> Any:
    """A model as vLLM has built it, on a GPU."""
    method = early.GptOssExpertsMethod.__new__(early.GptOssExpertsMethod) if is_ours else object()
    layer = SimpleNamespace(
        mlp=SimpleNamespace(experts=SimpleNamespace(routed_experts=SimpleNamespace(quant_method=method))),
        input_layernorm=SimpleNamespace(weight=SimpleNamespace(device=SimpleNamespace(index=index))),
    )
    return SimpleNamespace(model=SimpleNamespace(layers=[layer], start_layer=0))


def laid_out(rows: int, columns: int) -> Projection:
    """As vLLM stores a projection of `SMALL`."""
    blocks = torch.zeros(SMALL.experts, rows, columns // 2, dtype=torch.uint8)
    scales = torch.zeros(SMALL.experts, rows, columns // 32, dtype=torch.uint8)
    return Projection(mxfp4.hopper_values(blocks), mxfp4.hopper_scales(scales), torch.zeros(SMALL.experts, rows))


def test_the_calls_equal_those_of_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(sm90.nvrtc, "at_once", loaded.extend)
    monkeypatch.setattr(sm90, "partial_sums", lambda *sizes: None)
    up, down = laid_out(2 * SMALL.intermediate, SMALL.hidden), laid_out(SMALL.hidden, SMALL.intermediate)
    layer = sm90.prepare(up, down, active=4, routed=SMALL.experts)
    loaded += [*layer.few.loads(torch.int32, bands.FUSED_TOKENS), *layer.loads(torch.int32, bands.MANY_TOKENS)]
    later = {call for call in loaded if isinstance(call[1], CompileJob)}
    assert set(early.loads(a_model(), Deployment(SMALL))) == later
    assert len(later) > 10
    assert {call[1].device for call in early.loads(a_model(index=3), Deployment(SMALL))} == {3}


@pytest.mark.parametrize(("dtype", "element"), [("auto", cache.BF16), ("fp8", cache.E4M3)])
def test_the_one_launch_is_compiled_for_the_shape_that_it_has_later(dtype: str, element: str) -> None:
    first, *_ = early.loads(a_model(), Deployment(GPT_OSS_20B, kv_cache_dtype=dtype))

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    few = sm90.of_sizes(Deployment(GPT_OSS_20B).experts_of_a_rank, 4, 32, 0).few
    tensors = SimpleNamespace(norm=tensor(2880), cos_sin=tensor(1), out_weight=tensor(2880, 4096), experts=few)
    made = step.Step([tensors] * 24, eps=1e-5, element=element)  # type: ignore[list-item]
    assert first == (step.compile_for, made.shape, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_the_next_load_waits_and_a_failed_one_is_repeated(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr(nvrtc, "_in_background", [])
    may_end, done = threading.Event(), []

    def load(name: str) -> None:
        if name == "early":
            may_end.wait(10)
        done.append(name)
        if fails and len(done) == 1:
            raise nvrtc.NvrtcError("refused")

    def calls(name: str) -> Iterator[Any]:
        yield load, name

    nvrtc.in_background(calls("early"))
    assert done == []
    threading.Timer(0.1, may_end.set).start()
    nvrtc.at_once(calls("later"))
    assert done == ["early", "later"]


def test_nothing_is_compiled_for_experts_of_vllm() -> None:
    assert not list(early.loads(a_model(is_ours=False), Deployment(GPT_OSS_20B)))
