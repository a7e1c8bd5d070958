"""A weight that is no longer where the kernels read it must be found before the next launch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_gptoss.engine.kernels import scratch
from vllm_gptoss.engine.kernels.cache import Fp8Cache
from vllm_gptoss.engine.model import addresses


class Linear(nn.Module):
    def __init__(self, rows: int, columns: int, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        self.weight = nn.Parameter(torch.ones(rows, columns), requires_grad=False)
        self.bias = nn.Parameter(torch.ones(rows), requires_grad=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.ones(2))
        self.qkv_proj, self.o_proj = Linear(8, 4, "attn.qkv_proj"), Linear(4, 4)
        self.rotary_emb = SimpleNamespace(cos_sin_cache=torch.ones(3, 4))
        self.attn = CachedAttention()


class CachedAttention(nn.Module):
    """vLLM's `Attention` with a cache of e4m3 codes."""

    sliding_window, layer_name, kv_cache_dtype = 128, "layers.0.attn", "fp8"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_k_scale", torch.tensor(0.5))
        self.register_buffer("_v_scale", torch.tensor(2.0))
        self.kv_cache = torch.zeros(2, 8, 16, 128, dtype=torch.uint8)


def a_layer() -> Any:
    runner = SimpleNamespace(
        moe_config=SimpleNamespace(experts_per_token=4), routed_experts=SimpleNamespace(quant_method=object())
    )
    norm = lambda: Linear(4, 1)  # noqa: E731
    return SimpleNamespace(
        attn=Attention(),
        mlp=SimpleNamespace(router=Linear(2, 4), experts=runner),
        input_layernorm=norm(),
        post_attention_layernorm=norm(),
    )


def rebind(parameter: nn.Parameter) -> None:
    """As prefetch offloading points a parameter at its buffer."""
    parameter.data = parameter.data.clone()


MOVES: dict[str, Callable[[Any], Any]] = {
    "qkv weight": lambda layer: rebind(layer.attn.qkv_proj.weight),
    "qkv bias": lambda layer: rebind(layer.attn.qkv_proj.bias),
    "out weight": lambda layer: rebind(layer.attn.o_proj.weight),
    "out bias": lambda layer: rebind(layer.attn.o_proj.bias),
    "router weight": lambda layer: rebind(layer.mlp.router.weight),
    "router bias": lambda layer: rebind(layer.mlp.router.bias),
    "sinks": lambda layer: rebind(layer.attn.sinks),
    "norm": lambda layer: rebind(layer.input_layernorm.weight),
    "second norm": lambda layer: rebind(layer.post_attention_layernorm.weight),
    "another parameter": lambda layer: setattr(layer.attn.o_proj, "weight", nn.Parameter(torch.ones(4, 4))),
    "no parameter": lambda layer: delattr(layer.attn.o_proj, "weight"),
    "scale of the keys": lambda layer: setattr(layer.attn.attn, "_k_scale", torch.tensor(0.5)),
    "scale of the values": lambda layer: delattr(layer.attn.attn, "_v_scale"),
}


class LoRALinear(nn.Module):
    """As vLLM wraps a linear layer, `BaseLinearLayerWithLoRA` of vllm/lora/layers/base_linear.py."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.weight_of_an_adapter = nn.Parameter(torch.zeros(3))


def test_the_weights_below_loras_wrappers_are_found() -> None:
    plain, wrapped = a_layer(), a_layer()
    attention = wrapped.attn
    attention.qkv_proj, attention.o_proj = LoRALinear(attention.qkv_proj), LoRALinear(attention.o_proj)
    place, other = addresses.look_up(wrapped, 0), addresses.look_up(plain, 0)
    below = (attention.qkv_proj.base_layer, attention.o_proj.base_layer)
    tensors = place.tensors
    assert [tensors.qkv_weight.data_ptr(), tensors.out_weight.data_ptr()] == [each.weight.data_ptr() for each in below]
    assert [name for _, name, _ in place.weights] == [name for _, name, _ in other.weights]
    assert addresses.moved([place]) is None
    rebind(attention.o_proj.base_layer.bias)
    assert addresses.moved([place]) is not None


@pytest.mark.parametrize("name", MOVES)
def test_every_weight_that_moves_is_found(name: str) -> None:
    layers = [a_layer(), a_layer()]
    places = [addresses.look_up(layer, 0) for layer in layers]
    assert addresses.moved(places) is None
    MOVES[name](layers[1])
    assert addresses.moved(places) is not None


def test_scales_are_those_of_a_cache_of_codes_as_they_are_now() -> None:
    layer = a_layer()
    place = addresses.look_up(layer, 0)
    layer.attn.attn._k_scale.fill_(0.25)
    cache = place.cache
    assert isinstance(cache, Fp8Cache)
    assert (float(cache.k_scale), float(cache.v_scale)) == (0.25, 2.0)
    assert cache.tensor is layer.attn.attn.kv_cache
    layer.attn.attn.kv_cache_dtype = "bfloat16"
    place = addresses.look_up(layer, 0)
    assert place.cache is layer.attn.attn.kv_cache
    assert not any(name == "_k_scale" for _, name, _ in place.weights)


def test_a_weight_that_is_overwritten_has_not_moved() -> None:
    """A reload copies into parameters."""
    layer = a_layer()
    places = [addresses.look_up(layer, 0)]
    layer.attn.qkv_proj.weight.data.copy_(torch.zeros(8, 4))
    assert addresses.moved(places) is None


def test_the_message_names_module_and_parameter() -> None:
    layer = a_layer()
    places = [addresses.look_up(layer, 0)]
    rebind(layer.attn.qkv_proj.bias)
    assert addresses.moved(places) == "bias of attn.qkv_proj has moved in memory"


def test_experts_that_became_upstreams_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, ours = a_layer(), SimpleNamespace(few=SimpleNamespace(up=SimpleNamespace(tiles=4)))
    monkeypatch.setattr(addresses, "own_experts", lambda layer: ours)
    places = [addresses.look_up(layer, 0)]
    assert addresses.moved(places) is None
    monkeypatch.setattr(addresses, "own_experts", lambda layer: None)
    assert addresses.moved(places) == "the expert kernels of layers.0.attn have changed"


def test_scratch_survives_what_discards_everything_but_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's worker copies the buffers to the host before it sleeps at level 2, and back when it wakes."""
    monkeypatch.setattr(scratch, "_tensors", {})

    @scratch.keep
    def sums(device: int, rows: int) -> torch.Tensor:
        return torch.full((rows,), -1)

    with torch.inference_mode():
        kept = sums(0, 3)
    assert sums(0, 3) is kept
    model, layer = nn.Module(), a_layer()
    addresses.keep_scratch(model, [addresses.look_up(layer, 0)])
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _, buffer in model.named_buffers():
        buffer.data.fill_(99)
    for name, buffer in model.named_buffers():  # refused for tensors made in inference mode
        buffer.data.copy_(saved[name])
    assert kept.tolist() == [-1, -1, -1]
    assert layer.attn.rotary_emb.cos_sin_cache.unique().tolist() == [1.0]
    assert model.state_dict() == {}, "a checkpoint of the model does not contain scratch memory"
