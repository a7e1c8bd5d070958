"""The files are those of openai/gpt-oss-20b, only smaller."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from demo import prompts
from demo.conversation import by_id
from demo.render import encode, encoding, target
from vllm_gptoss.engine import spec


@pytest.fixture(scope="module")
def config(model_dir: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    return data


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


def published(config: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """Name -> dtype and shape, as in the published checkpoint (its safetensors index), for this config's sizes."""
    h, i, e = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    q, kv = (config[k] * config["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    out = {
        "model.embed_tokens.weight": ("BF16", [201_088, h]),
        "lm_head.weight": ("BF16", [201_088, h]),
        "model.norm.weight": ("BF16", [h]),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{name}{norm}.weight"] = ("BF16", [h])
        for letter, rows, columns in (("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
            out[f"{name}self_attn.{letter}_proj.weight"] = ("BF16", [rows, columns])
            out[f"{name}self_attn.{letter}_proj.bias"] = ("BF16", [rows])
        out[f"{name}self_attn.sinks"] = ("BF16", [config["num_attention_heads"]])
        out[f"{name}mlp.router.weight"], out[f"{name}mlp.router.bias"] = ("BF16", [e, h]), ("BF16", [e])
        for part, rows, columns in (("gate_up_proj", 2 * i, h), ("down_proj", h, i)):
            out[f"{name}mlp.experts.{part}_blocks"] = ("U8", [e, rows, columns // 32, 16])
            out[f"{name}mlp.experts.{part}_scales"] = ("U8", [e, rows, columns // 32])
            out[f"{name}mlp.experts.{part}_bias"] = ("BF16", [e, rows])
    return out


def test_tensors_have_the_published_names_shapes_and_dtypes(model_dir: Path, config: dict[str, Any]) -> None:
    with safe_open(model_dir / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        found = {n: (file.get_slice(n).get_dtype(), file.get_slice(n).get_shape()) for n in file.keys()}  # noqa: SIM118
    assert found == published(config)


def test_the_config_says_what_the_published_one_says(config: dict[str, Any]) -> None:
    assert config["architectures"] == [spec.ARCHITECTURE]
    assert config["sliding_window"] == 128
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * (config["num_hidden_layers"] // 2)
    assert config["rope_theta"] == 150_000
    assert config["rope_scaling"] == {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    }
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert config["swiglu_limit"] == 7.0
    assert config["head_dim"] == 64


def test_the_weights_in_the_repository_are_small() -> None:
    assert (Path(__file__).parents[2] / "demo" / "weights.safetensors").stat().st_size < 3_000_000


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_the_tokenizer_agrees_with_the_library(tokenizer: Any, text: str) -> None:
    ids = encoding().encode(text, disallowed_special=())
    if "<|" not in text:
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    assert tokenizer.decode(ids) == text


def test_the_tokenizer_knows_every_control_token(tokenizer: Any) -> None:
    assert len(tokenizer) == 201_088
    for token in range(199_998, 201_088):
        assert tokenizer.convert_ids_to_tokens(token) == encoding().decode([token])


def test_words_of_many_scripts_are_cut_alike(tokenizer: Any) -> None:
    rng = random.Random(1)
    for _ in range(300):
        ids = [rng.randrange(199_998) for _ in range(20)]
        text = encoding()._inner.decode_bytes(ids).decode("utf-8", "ignore")
        assert tokenizer(text)["input_ids"] == encoding().encode(text, disallowed_special=())


def test_transformers_loads_it_and_knows_the_conversations(model_dir: Path) -> None:
    """transformers dequantises the experts: an independent implementation of the format."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    for name in ("capital", "json-schema"):
        wanted = encode(target(by_id(name).turns[0].steps[0]))
        prompt = torch.tensor([prompts.ours(by_id(name), 0, 0)])
        with torch.no_grad():
            out = model.generate(prompt, max_new_tokens=len(wanted), do_sample=False, top_k=None)
        assert out[0, prompt.shape[1] :].tolist() == wanted
