"""Risks of reading Marlin's layout: a weight, a scale or a bias is elsewhere than vLLM stores it; a step that has no
kernel of ours does not run vLLM's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.marlin import bias_of, codes_of, registers, scales_of
from vllm_gptoss.engine.choose import ChoiceError, Deployment
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.experts import sm80
from vllm_gptoss.engine.experts.marlin import marlin_bias, marlin_scales, marlin_values
from vllm_gptoss.engine.kernels.experts_marlin import MarlinFewExperts, MarlinProjection
from vllm_gptoss.engine.spec import ModelSpec

ROWS, COLUMNS = 192, 256


def test_the_maps_are_those_of_vllm() -> None:
    """vLLM's permutations in torch. benchmarks/sm80_experts.py compares its GPU kernel, which repacks the values."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4, marlin_utils_test

    torch.manual_seed(1)
    blocks = torch.randint(0, 256, (1, ROWS, COLUMNS // 2), dtype=torch.uint8)
    codes = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-2)[0]
    perm = marlin_utils_test.get_weight_perm(4)
    wanted = marlin_utils_test.marlin_weights(codes.T.int().contiguous(), COLUMNS, ROWS, 4, perm)
    assert torch.equal(marlin_values(blocks)[0].contiguous().view(torch.int32), wanted)

    scales = torch.randint(1, 255, (1, ROWS, COLUMNS // 32), dtype=torch.uint8)
    real = scales[0].view(torch.float8_e8m0fnu).to(torch.bfloat16).T
    permuted = marlin_utils.marlin_permute_scales(real, COLUMNS, ROWS, 32)
    stored = marlin_utils_fp4.mxfp4_marlin_process_scales(permuted)
    assert torch.equal(marlin_scales(scales)[0], stored.view(torch.uint8))

    bias = torch.randn(2, ROWS)
    assert torch.equal(marlin_bias(bias)[1], marlin_utils.marlin_permute_bias(bias[1]))
    assert torch.equal(codes_of(marlin_values(blocks))[0], codes)
    assert torch.equal(scales_of(marlin_scales(scales)), scales)
    assert torch.equal(bias_of(marlin_bias(bias)), bias)


def lane(g: int, j: int) -> tuple[list[int], list[int]]:
    """Rows and columns in a tile of the eight elements of A that lane 4 g + j of mma.m16n8k16 holds, a0 to a3."""
    rows = [g, g, g + 8, g + 8] * 2
    columns = [2 * j, 2 * j + 1] * 2 + [2 * j + 8, 2 * j + 9] * 2
    return rows, columns


@pytest.mark.parametrize(("g", "j"), [(0, 0), (3, 1), (7, 3)])
def test_a_lane_decodes_its_operand_from_its_sixteen_bytes(g: int, j: int) -> None:
    """`marlin_registers` of marlin.cuh, with the constants of that file."""
    torch.manual_seed(2)
    blocks = torch.randint(0, 256, (1, ROWS, COLUMNS // 2), dtype=torch.uint8)
    codes = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-2)[0]
    stored = marlin_values(blocks)[0].contiguous()
    for tile, unit, at in ((0, 0, 0), (5, 2, 3), (15, 1, 1)):
        begin = unit * 512 + (4 * g + j) * 16
        words = stored[tile, begin : begin + 16].contiguous().numpy().view(np.uint32)
        found = registers(torch.tensor([int(words[at])]))
        rows, columns = lane(g, j)
        wanted = codes[unit * 64 + at * 16 + torch.tensor(rows), tile * 16 + torch.tensor(columns)]
        assert torch.equal(found[0], wanted)


def test_every_word_decodes() -> None:
    """Carries of the products: each byte of a word takes all values, the others are zeros or ones."""
    values = torch.arange(256)
    for rest in (0, 0xFFFFFFFF):
        for byte in range(4):
            words = (values << 8 * byte) | (rest & ~(0xFF << 8 * byte))
            nibbles = torch.stack([words >> 4 * i & 0xF for i in (0, 4, 2, 6, 1, 5, 3, 7)], -1)
            assert torch.equal(registers(words), nibbles)


def test_scales_and_bias_of_a_lane() -> None:
    scales: Tensor = torch.arange(64, dtype=torch.uint8).view(1, 64, 1)
    stored = marlin_scales(scales)[0, 0].view(8, 8)
    for g in range(8):
        assert stored[g].tolist() == [g, g + 16, g + 8, g + 24, g + 32, g + 48, g + 40, g + 56]
    bias = marlin_bias(torch.arange(64.0)[None])[0]
    row = torch.arange(64)
    assert torch.equal(bias[(row & ~31) + (row >> 1 & 3) * 8 + (row >> 3 & 3) * 2 + (row & 1)], row.float())


def weights(experts: int = 4, hidden: int = 128, intermediate: int = 64) -> dict[str, Tensor]:
    """A layer as vLLM's loader leaves it; hidden is padded to 256, intermediate to 128."""
    torch.manual_seed(3)
    made = {}
    for name, rows, columns, shape in (
        ("w13", 2 * intermediate, hidden, (256, 256)),
        ("w2", hidden, intermediate, (256, 128)),
    ):
        more = (shape[1] - columns, shape[0] - rows)
        for kind, width in (("weight", 2), ("weight_scale", 32)):
            part = torch.randint(0, 128, (experts, rows, columns // width), dtype=torch.uint8)
            made[f"{name}_{kind}"] = torch.nn.functional.pad(part, (0, more[0] // width, 0, more[1]))
        made[f"{name}_bias"] = torch.nn.functional.pad(torch.randn(experts, rows).bfloat16(), (0, more[1]))
    return made


def as_stored(part: dict[str, Tensor]) -> dict[str, Tensor]:
    stored = {}
    for name in ("w13", "w2"):
        stored[f"{name}_weight"] = marlin_values(part[f"{name}_weight"]).contiguous().view(torch.int32)
        stored[f"{name}_weight_scale"] = marlin_scales(part[f"{name}_weight_scale"]).view(torch.float8_e8m0fnu)
        stored[f"{name}_bias"] = marlin_bias(part[f"{name}_bias"])
    return stored


class Layer(SimpleNamespace):
    expert_map, apply_router_weight_on_input = None, False


@pytest.fixture
def method(monkeypatch: pytest.MonkeyPatch) -> sm80.MarlinExpertsMethod:
    """A method on a device named A100; vLLM's base class stores the layout of the index maps, or `broken`."""
    of = sm80.MarlinExpertsMethod.__new__(sm80.MarlinExpertsMethod)
    model = ModelSpec("small", 2, 128, 128, 8, 4, 16, 2, 64, 201_088)
    moe, backend = SimpleNamespace(has_bias=True, experts_per_token=2), SimpleNamespace(value="MARLIN")
    fields = {"ours": None, "wish": "gptoss", "deployment": Deployment(model), "moe": moe, "mxfp4_backend": backend}
    for name, value in fields.items():
        object.__setattr__(of, name, value)

    def lay_out(self: Any, layer: Any) -> None:
        stored = as_stored(vars(layer))
        if getattr(layer, "broken", None):
            part = stored[layer.broken]
            stored[layer.broken] = part.view(torch.uint8).flip(-1).view(part.dtype)
        vars(layer).update(stored)

    upstream = sm80.MarlinExpertsMethod.__mro__[1]
    monkeypatch.setattr(upstream, "process_weights_after_loading", lay_out)
    monkeypatch.setattr(upstream, "apply", lambda *_: "upstream")
    monkeypatch.setattr(sm80.MarlinExpertsMethod, "is_monolithic", False)
    monkeypatch.setattr(sm80.device, "detect", lambda: Device("nvidia", "NVIDIA A100", "sm80", 79.3))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(sm80, "multiprocessors", lambda device: 108)
    monkeypatch.setattr(MarlinFewExperts, "compile", lambda *_: None)
    monkeypatch.setattr(MarlinFewExperts, "__call__", lambda self, x, ids, weights, out: out.fill_(7))
    return of


def run(of: sm80.MarlinExpertsMethod, layer: Any, tokens: int, shared: Any = None) -> Any:
    ids = torch.zeros(tokens, 2, dtype=torch.int32)
    return of.apply(layer, torch.zeros(tokens, 256).bfloat16(), ids.float(), ids, shared, None)


def test_few_tokens_are_ours_and_the_others_vllms(method: sm80.MarlinExpertsMethod) -> None:
    layer = Layer(**weights())
    assert run(method, layer, 1) == "upstream"
    method.process_weights_after_loading(layer)
    ours = method.ours
    assert ours is not None
    assert (ours.arch, ours.shared, ours.blocks) == ("sm_80", 163 << 10, 108)
    for tokens in (1, 64):
        assert run(method, layer, tokens).shape == (tokens, 256)
    for tokens, shared in ((0, None), (65, None), (1, object())):
        assert run(method, layer, tokens, shared) == "upstream"
    method.process_weights_after_loading(Layer(**weights()))  # a reload: vLLM copies into the first load's storage
    assert method.ours is ours
    large = weights()
    large["w2_weight_scale"][3, 100, 1] = 193
    with pytest.raises(ChoiceError, match="a scale is larger"):
        method.process_weights_after_loading(Layer(**large))


@pytest.mark.parametrize("part", list(weights()))
def test_another_layout_is_refused(method: sm80.MarlinExpertsMethod, part: str) -> None:
    with pytest.raises(ChoiceError, match="upstream's Marlin layout is not the one"):
        method.process_weights_after_loading(Layer(broken=part, **weights()))
    assert method.ours is None


@pytest.mark.parametrize(
    ("change", "why"),
    [({"rows": 96}, "no Marlin experts"), ({"rows": 512}, "512 x 128"), ({"columns": 320}, "320"),
     ({"bias": torch.zeros(4, 256)}, "float32"), ({"scales": torch.zeros(4, 8, 128).byte()}, "no Marlin experts")],
)  # fmt: skip
def test_a_projection_that_was_not_compiled_for_is_refused(change: dict[str, Any], why: str) -> None:
    stored = as_stored(weights())
    fields = {"values": stored["w13_weight"], "scales": stored["w13_weight_scale"], "bias": stored["w13_bias"]}
    MarlinProjection(**fields, rows=128, columns=128).check()
    with pytest.raises(ValueError, match=why):
        MarlinProjection(**{**fields, "rows": 128, "columns": 128, **change}).check()
