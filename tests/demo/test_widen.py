"""A wider model must answer as the small one does, or a GPU's tests would judge the widening."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from demo import checkpoint
from demo.model import Shape, SmallGptOss
from demo.widen import LIKE_20B, shifts, widen
from tests.support import whole_model
from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose.deployment import Deployment
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.spec import ModelSpec

SMALL = Shape(hidden=32, intermediate=64, layers=2, experts=4, heads=4, kv_heads=2)
WIDE = replace(SMALL, hidden=96, intermediate=320, layers=4, experts=12, heads=32, kv_heads=4)
TOKENS = 50


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """A checkpoint of random weights in which everything counts."""
    torch.manual_seed(0)
    model = SmallGptOss(SMALL, used=TOKENS, outputs=TOKENS)
    for parameter in model.parameters():
        if parameter.dim() == 1 or not parameter.abs().sum():
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    ends = {"model.embed_tokens.weight": torch.randn(TOKENS, SMALL.hidden), "lm_head.weight": model.head.detach()}
    return {name: tensor.bfloat16() for name, tensor in ends.items()} | checkpoint.layer_tensors(model)


def logits(folder: Path, shape: Shape, tensors: dict[str, Tensor], prompt: Tensor) -> Tensor:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(checkpoint.config(shape) | {"vocab_size": TOKENS}))
    return whole_model.forward(whole_model.load(folder, torch.float64), prompt)


def test_every_logit_is_the_small_models(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """In float64: what is left is the order of sums."""
    prompt = torch.randint(0, TOKENS, (200,), generator=torch.Generator().manual_seed(1))
    small = logits(tmp_path / "small", SMALL, tensors, prompt)
    wide = logits(tmp_path / "wide", WIDE, widen(SMALL, tensors, WIDE), prompt)
    assert small.std() > 0.1
    assert torch.allclose(small, wide, atol=1e-9, rtol=1e-9)


def test_nothing_that_is_read_is_zero(tensors: dict[str, Tensor]) -> None:
    """Zeros would hide a kernel that reads the wrong column. Added layers and routers of added experts aside."""
    for name, tensor in widen(SMALL, tensors, WIDE).items():
        read = name.endswith(("_proj.weight", "_scales", "sinks", "norm.weight", "lm_head.weight"))
        if read and ".3." not in name and not (".2." in name and "o_proj" in name):
            assert (tensor == 0).float().mean() < 0.01, name


@pytest.mark.parametrize("copies", [1, 2, 3, 7, 10, 16, 30])
def test_parts_sum_up_to_one_and_are_even(copies: int) -> None:
    parts = shifts(copies)
    assert len(parts) == copies
    assert sum(2.0**-part for part in parts) == 1
    assert max(parts) - min(parts) <= 1


@pytest.mark.parametrize(
    ("wide", "said"),
    [
        (replace(WIDE, hidden=100), "hidden 100 is no multiple of 32"),
        (replace(WIDE, heads=12, kv_heads=4), "do not copy"),
        (replace(WIDE, layers=3), "added in pairs"),
        (replace(WIDE, window=64), "only sizes may differ"),
    ],
)
def test_what_cannot_be_is_said(tensors: dict[str, Tensor], wide: Shape, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        widen(SMALL, tensors, wide)


def test_every_kernel_takes_the_shape_on_a_hopper_gpu() -> None:
    model = ModelSpec.from_json(checkpoint.config(LIKE_20B), "wide")
    hopper, served = Device("nvidia", "NVIDIA H200", "sm90", 139.8), Deployment(model)
    found = [part(hopper, served).value for part in (choose.layers, choose.one_token, choose.experts)]
    assert found == ["gptoss", "one launch", "gptoss"]
