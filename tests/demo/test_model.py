"""The model that is trained must be the model that is served."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from demo import dataset, train
from demo.checkpoint import config, layer_tensors, mxfp4, pack, tensors, unpack
from demo.model import Shape, SmallGptOss, mxfp4_codes, mxfp4_values


@pytest.fixture
def model() -> SmallGptOss:
    torch.manual_seed(0)
    model = SmallGptOss(Shape(), used=50, outputs=50)
    for parameter in model.parameters():
        if parameter.dim() == 1 or not parameter.abs().sum():
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return model


def theirs(model: SmallGptOss) -> Any:
    """transformers' model with the same fp32 weights."""
    from transformers import GptOssConfig, GptOssForCausalLM

    data = config(model.shape) | {"vocab_size": 51, "pad_token_id": None, "eos_token_id": None}
    del data["quantization_config"], data["torch_dtype"], data["architectures"]
    other = GptOssForCausalLM(GptOssConfig(**data, attn_implementation="eager")).float().eval()
    other.model.embed_tokens.weight.data = model.embedding.data
    other.lm_head.weight.data = torch.cat([model.head.data, torch.zeros(1, model.shape.hidden)])
    other.model.norm.weight.data = model.norm.data
    for layer, block in zip(other.model.layers, model.blocks, strict=True):
        layer.input_layernorm.weight.data, layer.post_attention_layernorm.weight.data = block.norm1, block.norm2
        layer.self_attn.sinks.data = block.sinks.data
        for letter in "qkvo":
            getattr(layer.self_attn, f"{letter}_proj").load_state_dict(getattr(block, letter).state_dict())
        layer.mlp.router.load_state_dict(block.router.state_dict())
        experts = layer.mlp.experts
        experts.gate_up_proj.data = block.gate_up.data.transpose(1, 2)
        experts.down_proj.data = block.down.data.transpose(1, 2)
        experts.gate_up_proj_bias.data, experts.down_proj_bias.data = block.gate_up_bias.data, block.down_bias.data
    return other


@torch.no_grad()
def test_logits_equal_those_of_transformers(model: SmallGptOss) -> None:
    """300 tokens: beyond the window of 128 and below YaRN's original length. Both compute in fp32 and differ only in
    the order of sums: 4 layers of up to 256 terms at 6e-8 each stay below 1e-4 at logits of size 1."""
    rows = torch.randint(0, 51, (2, 300))
    mine = model(rows, serving=False) @ model.head.T
    torch.testing.assert_close(mine, theirs(model)(rows).logits[..., :50], atol=1e-4, rtol=0)


def test_every_parameter_is_trained(model: SmallGptOss) -> None:
    hidden = model(torch.randint(0, 51, (2, 40)), serving=True)
    model.log_probability(hidden.flatten(0, 1), torch.randint(0, 50, (80,))).mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()] == []


def test_probabilities_are_those_of_the_full_vocabulary(model: SmallGptOss) -> None:
    hidden = torch.randn(3, model.shape.hidden)
    logits = torch.cat([hidden @ model.head.T, torch.zeros(3, 201_088 - 50)], -1)
    wanted = torch.tensor([0, 7, 49])
    expected = logits.double().log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    torch.testing.assert_close(model.log_probability(hidden, wanted).double(), expected, atol=1e-5, rtol=0)


def test_packed_experts_are_what_training_rounded_to() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(1)
    weight = torch.randn(4, 64, 96) * torch.logspace(-6, 3, 64)[:, None]
    blocks, scales = mxfp4(weight)
    served = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # transposed: [E, C, N]
    assert torch.equal(served.transpose(1, 2), mxfp4_values(*mxfp4_codes(weight)))


def test_rounding_moves_no_value_further_than_the_format_must() -> None:
    """Half the distance of the neighbouring codes: at most one unit below 6, and 6 to 7 saturate by less than one."""
    weight = torch.randn(64, 96)
    codes, exponent = mxfp4_codes(weight)
    units = torch.ldexp(weight.unflatten(-1, (-1, 32)), -exponent[..., None])
    rounded = torch.ldexp(mxfp4_values(codes, exponent).unflatten(-1, (-1, 32)), -exponent[..., None])
    assert units.abs().max() <= 7
    assert (units - rounded).abs().max() <= 1
    assert (units - rounded)[units.abs() <= 2].abs().max() <= 0.25


def test_zero_groups_stay_zero() -> None:
    assert torch.equal(mxfp4_values(*mxfp4_codes(torch.zeros(2, 32))), torch.zeros(2, 32))


def test_the_packed_layers_carry_every_weight(model: SmallGptOss) -> None:
    tensors = layer_tensors(model)
    stored = sum(
        t.numel() * 2 if n.endswith("_blocks") else t.numel() for n, t in tensors.items() if "_scales" not in n
    )
    trained = sum(p.numel() for p in model.parameters()) - model.embedding.numel() - model.head.numel()
    assert stored == trained


def test_packed_weights_unpack_to_what_is_packed_again(tmp_path: Path) -> None:
    """So that training can go on from the weights in the repository."""
    torch.save(unpack(), tmp_path / "trained.pt")
    pack(tmp_path / "trained.pt", tmp_path / "again.safetensors")
    _, before = tensors()
    _, after = tensors(tmp_path / "again.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        if not name.endswith(("_blocks", "_scales")):
            assert torch.equal(value, after[name]), name


def test_training_on_a_cpu_learns_and_saves(tmp_path: Path) -> None:
    """Twelve steps of a smaller shape, mostly with the rounding of serving."""
    data = dataset.build(40, seed=5, longest=250)
    np.savez(tmp_path / "data.npz", **data)
    options = argparse.Namespace(
        dataset=tmp_path / "data.npz", out=tmp_path / "out.pt", device="cpu", resume=False, hidden=32, intermediate=32,
        layers=2, steps=12, seconds=0.0, tokens=800, lr=1e-2, seed=1, every=100,
    )  # fmt: skip
    batches = train.Batches(data, "cpu")
    rows, marks, _ = next(batches.train(800, 9))

    def loss(model: SmallGptOss) -> float:
        return -float(train.log_probabilities(model, batches, rows, marks, serving=True)[0].detach().mean())

    shape = Shape(hidden=32, intermediate=32, layers=2)
    before = loss(SmallGptOss(shape, len(data["used"]), len(data["outputs"])))
    assert loss(train.train(options)) < before - 1
    assert torch.load(tmp_path / "out.pt", weights_only=True)["shape"]["hidden"] == 32
