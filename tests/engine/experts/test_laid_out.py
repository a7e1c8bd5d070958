"""A reload of experts that are no parameters: new bytes at the old addresses, or captured graphs read freed memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gptoss.engine.choose import Deployment
from vllm_gptoss.engine.experts import method
from vllm_gptoss.engine.experts.laid_out import LaidOut
from vllm_gptoss.engine.spec import GPT_OSS_20B

UPSTREAM = method.GptOssMxfp4MoEMethod


def wrapped(value: int, width: int = 8) -> Any:
    """As triton_kernels wraps a tensor: no `torch.Tensor`."""
    return SimpleNamespace(storage=SimpleNamespace(data=torch.full((2, width), value, dtype=torch.uint8)))


class Layer(torch.nn.Module):
    """vLLM's `RoutedExperts` with the weights of a checkpoint, each byte `value`."""

    def __init__(self, value: int, width: int = 8) -> None:
        super().__init__()
        self.load(value, width)

    def load(self, value: int, width: int = 8) -> None:
        """As a layerwise reload puts parameters in the checkpoint's format in place of what is there."""
        self.value, self.width = value, width
        for name in ("w13_weight", "w2_weight"):
            if hasattr(self, name):
                delattr(self, name)
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(1), requires_grad=False))


@pytest.fixture
def of(monkeypatch: pytest.MonkeyPatch) -> method.GptOssExpertsMethod:
    """The plugin's method over a fake of vLLM's method that converts `Layer.value` into new objects."""

    def lay_out(self: Any, layer: Layer) -> None:
        for name in ("w13_weight", "w2_weight"):
            delattr(layer, name)
            setattr(layer, name, wrapped(layer.value, layer.width))
        for name in ("w13_bias", "w2_bias"):
            setattr(layer, name, torch.nn.Parameter(torch.full((2, 3), float(layer.value))))
        for name in ("w13_precision_config", "w2_precision_config"):
            setattr(self, name, SimpleNamespace(weight_scale=wrapped(layer.value + 1)))
        self.moe_quant_config, self.moe_kernel = object(), object()

    monkeypatch.setattr(UPSTREAM, "process_weights_after_loading", lay_out)
    monkeypatch.setattr(UPSTREAM, "apply_monolithic", lambda self, layer, *_: int(layer.w13_weight.storage.data[0, 0]))
    monkeypatch.setattr("vllm_gptoss._vllm.worker.weight_scale", lambda precision: precision.weight_scale)
    monkeypatch.setattr(method.GptOssExpertsMethod, "_before", lambda self, layer: "samples")
    monkeypatch.setattr(method.GptOssExpertsMethod, "_after", lambda self, layer, samples: KERNELS)
    made = method.GptOssExpertsMethod.__new__(method.GptOssExpertsMethod)
    for name, value in (("ours", None), ("laid_out", None), ("wish", "auto"), ("deployment", Deployment(GPT_OSS_20B))):
        object.__setattr__(made, name, value)
    return made


KERNELS: Any = SimpleNamespace(kernel=lambda tokens: None)


def found(of: method.GptOssExpertsMethod, layer: Layer) -> tuple[list[int], set[int]]:
    """Addresses of the tensors that upstream reads, and the values in them."""
    tensors = LaidOut.of(of, layer)
    return [each.data_ptr() for each in tensors.tensors], {int(each.flatten()[0]) for each in tensors.tensors}


def test_a_reload_writes_new_bytes_to_the_old_addresses(of: method.GptOssExpertsMethod) -> None:
    layer = Layer(1)
    of.process_weights_after_loading(layer)
    kernel, (addresses, values) = of.moe_kernel, found(of, layer)
    assert values == {1, 2}
    layer.load(5)
    of.process_weights_after_loading(layer)
    assert found(of, layer)[0][:4] == addresses[:4], "biases are parameters: vLLM puts the old ones back"
    assert {int(each.flatten()[0]) for each in of.laid_out.tensors} == {5, 6}
    assert of.moe_kernel is kernel
    assert of.ours is KERNELS


def test_a_reload_without_the_experts_keeps_them(of: method.GptOssExpertsMethod) -> None:
    """Stock's next step is an AttributeError."""
    layer = Layer(7)
    of.process_weights_after_loading(layer)
    del layer.w13_weight, layer.w2_weight
    assert of.apply_monolithic(layer, torch.empty(3, 4), torch.empty(3, 2)) == 7


def test_experts_of_another_shape_are_refused_before_a_byte_is_written(of: method.GptOssExpertsMethod) -> None:
    layer = Layer(1)
    of.process_weights_after_loading(layer)
    layer.load(5, width=9)
    with pytest.raises(ValueError, match=r"reloaded experts are \[2, 9\] torch.uint8, not \[2, 8\]"):
        of.process_weights_after_loading(layer)
    assert {int(each.flatten()[0]) for each in of.laid_out.tensors} == {1, 2}


@pytest.mark.parametrize("graphs", [True, False])
def test_weights_that_the_kernels_refuse_are_upstreams_or_an_error(
    of: method.GptOssExpertsMethod, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """Without graphs the next step is upstream's; a captured graph cannot be changed."""
    layer = Layer(1)
    of.process_weights_after_loading(layer)
    of.deployment = Deployment(GPT_OSS_20B, graphs=graphs)

    def refuse(self: Any, layer: Any) -> None:
        raise method.fallback.UnavailableError("a scale is too large")

    monkeypatch.setattr(method.GptOssExpertsMethod, "_before", refuse)
    layer.load(5)
    if graphs:
        with pytest.raises(ValueError, match="restart the server with GPTOSS_EXPERTS=upstream"):
            of.process_weights_after_loading(layer)
        return
    of.process_weights_after_loading(layer)
    assert of.ours is None
    assert of.apply_monolithic(layer, torch.empty(3, 4), torch.empty(3, 2)) == 5
