"""The checkpoint in openai/gpt-oss-20b's format: names, shapes, dtypes, config.json.

`pack` turns a training checkpoint into `weights.safetensors` (only rows of the embedding and head that are used),
`tensors` turns that back into the full state dict.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from demo.model import FULL_VOCABULARY, Shape, SmallGptOss, mxfp4_codes, mxfp4_values

WEIGHTS = Path(__file__).with_name("weights.safetensors")


def config(shape: Shape) -> dict[str, Any]:
    """config.json with the keys of gpt-oss-20b's."""
    kinds = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(shape.layers)]
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": shape.active,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initial_context_length": shape.original,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "layer_types": kinds,
        "max_position_embeddings": 131_072,
        "model_type": "gpt_oss",
        "num_attention_heads": shape.heads,
        "num_experts_per_tok": shape.active,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "num_local_experts": shape.experts,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": shape.eps,
        "rope_scaling": {
            "beta_fast": shape.beta_fast,
            "beta_slow": shape.beta_slow,
            "factor": shape.factor,
            "original_max_position_embeddings": shape.original,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": shape.theta,
        "router_aux_loss_coef": 0.9,
        "sliding_window": shape.window,
        "swiglu_limit": shape.limit,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": FULL_VOCABULARY,
    }


def generation_config() -> dict[str, Any]:
    """As gpt-oss-20b's; `top_k` is 1, so that answers are exact when a request names no temperature."""
    return {
        "bos_token_id": 199998,
        "do_sample": True,
        "eos_token_id": [200002, 199999, 200012],
        "pad_token_id": 199999,
        "top_k": 1,
    }


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [E, N, C] -> blocks u8 [E, N, C/32, 16] (low nibble first), scales u8 [E, N, C/32] (exponent + 127)."""
    codes, exponent = mxfp4_codes(weight)
    pairs = codes.unflatten(-1, (-1, 16, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous(), (exponent + 127).to(torch.uint8)


def _names(layer: int) -> dict[str, str]:
    """Parameter of a block -> published name, for all that is stored as bf16."""
    at = f"model.layers.{layer}."
    out = {"norm1": "input_layernorm.weight", "norm2": "post_attention_layernorm.weight", "sinks": "self_attn.sinks"}
    for kind in ("weight", "bias"):
        out |= {f"{letter}.{kind}": f"self_attn.{letter}_proj.{kind}" for letter in "qkvo"}
        out[f"router.{kind}"] = f"mlp.router.{kind}"
    out |= {"gate_up_bias": "mlp.experts.gate_up_proj_bias", "down_bias": "mlp.experts.down_proj_bias"}
    return {mine: at + name for mine, name in out.items()}


def layer_tensors(model: SmallGptOss) -> dict[str, Tensor]:
    """Everything but embedding and head, under the names of the published checkpoint."""
    out = {"model.norm.weight": model.norm.detach().bfloat16()}
    for index, block in enumerate(model.blocks):
        for mine, name in _names(index).items():
            out[name] = block.get_parameter(mine).detach().bfloat16()
        for part, weight in (("gate_up_proj", block.gate_up), ("down_proj", block.down)):
            blocks, scales = mxfp4(weight)
            name = f"model.layers.{index}.mlp.experts.{part}"
            out[f"{name}_blocks"], out[f"{name}_scales"] = blocks, scales
    return out


def pack(trained: Path, out: Path = WEIGHTS) -> None:
    """Training checkpoint -> `out`. Rows are ordered by token id; all other ids share the embedding's last row."""
    data = torch.load(trained, map_location="cpu", weights_only=True)
    shape = Shape(**data["shape"])
    model = SmallGptOss(shape, len(data["used"]), len(data["outputs"]))
    model.load_state_dict(data["model"])
    tensors = layer_tensors(model)
    tensors["used_ids"] = data["used"].int()
    tensors["output_ids"] = data["used"][data["outputs"].long()].int()
    tensors["used_rows"] = model.embedding.detach().bfloat16()
    tensors["output_rows"] = model.head.detach().bfloat16()
    save_file(tensors, out, metadata={"shape": json.dumps(data["shape"])})


def tensors(packed: Path = WEIGHTS) -> tuple[Shape, dict[str, Tensor]]:
    """The shape and the full state dict of the packed weights."""
    with safe_open(packed, "pt") as file:
        out = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        shape = Shape(**json.loads(file.metadata()["shape"]))
    rows, used = out.pop("used_rows"), out.pop("used_ids").long()
    embedding = rows[-1:].repeat(FULL_VOCABULARY, 1)
    embedding[used] = rows[:-1]
    head = torch.zeros(FULL_VOCABULARY, shape.hidden, dtype=torch.bfloat16)
    head[out.pop("output_ids").long()] = out.pop("output_rows")
    return shape, {"model.embed_tokens.weight": embedding, "lm_head.weight": head, **out}


def unpack(packed: Path = WEIGHTS) -> dict[str, Any]:
    """The packed weights as a training checkpoint, to train on from."""
    with safe_open(packed, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        shape = json.loads(file.metadata()["shape"])
    used, outputs = stored["used_ids"], stored["output_ids"]
    row = {int(token): i for i, token in enumerate(used)}
    model = SmallGptOss(Shape(**shape), len(used), len(outputs))
    state = {"embedding": stored["used_rows"], "head": stored["output_rows"], "norm": stored["model.norm.weight"]}
    for index in range(len(model.blocks)):
        for mine, name in _names(index).items():
            state[f"blocks.{index}.{mine}"] = stored[name]
        for mine, part in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            name = f"model.layers.{index}.mlp.experts.{part}"
            blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
            codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-3)
            state[f"blocks.{index}.{mine}"] = mxfp4_values(codes, scales.int() - 127)
    model.load_state_dict({name: value.float() for name, value in state.items()})
    rows = torch.tensor([row[int(token)] for token in outputs], dtype=torch.int32)
    return {"model": model.state_dict(), "shape": shape, "used": used, "outputs": rows}


def main() -> None:
    """`python -m demo.checkpoint TRAINED.pt`: writes weights.safetensors."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("trained", type=Path)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    args = parser.parse_args()
    pack(args.trained, args.out)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
