"""Every setting in vLLM's first guides, in both languages, its announcement and Modal's example is in a recipe, or in
troubleshooting with its replacement."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from vllm_gptoss.cli.recipes import load, render
from vllm_gptoss.cli.recipes.schema import Recipe
from vllm_gptoss.engine.choose import devices
from vllm_gptoss.engine.spec import GPT_OSS_20B, GPT_OSS_120B, WINDOW

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
RECIPES = load.shipped()

SET: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("120b", "2xH100", {"tensor-parallel-size": 2}),
    ("120b", "4xH200", {"tensor-parallel-size": 4}),
    ("120b", "8xH100", {"tensor-parallel-size": 8}),
    ("120b", "2xA100", {"tensor-parallel-size": 2}),
    ("120b", "4xA100", {"tensor-parallel-size": 4}),
    ("120b", "2xB200", {"tensor-parallel-size": 2}),
    ("120b", "4xB200", {"tensor-parallel-size": 4}),
    ("120b", "8xH100", {"max-num-batched-tokens": 10240, "max-num-seqs": 128, "gpu-memory-utilization": 0.85}),
    ("120b", "8xH100", {"no-enable-prefix-caching": True}),
    ("120b", "MI355X", {"block-size": 64}),
    (
        "120b",
        "MI355X",
        {"compilation-config": {"compile_sizes": [1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 4096, 8192]}},
    ),
    ("20b", "H100", {"kv-cache-dtype": "fp8", "max-model-len": 2**15, "max-num-seqs": 32}),
    ("20b", "H100", {"tool-server": "demo"}),
)
"""Flags: model, device, and the settings of one of their recipes."""

PLAIN = (
    *(("20b", each) for each in ("A100", "H100", "H200", "B200")),
    *(("120b", each) for each in ("H200", "B200")),
)
"""Models and devices that the guides serve without a flag that matters today."""

_WORDS = (
    "vllm==0.10.1+gptoss --pre --extra-index-url --index-strategy vllm/vllm-openai:gptoss --async-scheduling"
    " TRITON_ATTN_VLLM_V1 VLLM_ATTENTION_BACKEND VLLM_USE_TRTLLM_ATTENTION VLLM_USE_TRTLLM_DECODE_ATTENTION"
    " VLLM_USE_TRTLLM_CONTEXT_ATTENTION VLLM_USE_FLASHINFER_MXFP4_MOE VLLM_USE_FLASHINFER_MXFP4_BF16_MOE"
    " VLLM_USE_FLASHINFER_MOE_MXFP4_BF16 VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8 rocm/vllm-dev:open-mi355-08052025"
    " rocm/vllm-dev:open-mi300-08052025 rocm/vllm-dev:open-r9700-08052025 --network=host --cap-add=SYS_PTRACE"
    " seccomp=unconfined VLLM_ROCM_USE_AITER VLLM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_AITER_MHA full_cuda_graph"
    " VLLM_USE_AITER_TRITON_FUSED_SPLIT_QKV_ROPE VLLM_USE_AITER_TRITON_FUSED_ADD_RMSNORM_PAD"
    " VLLM_USE_AITER_TRITON_GEMM TRITON_HIP_PRESHUFFLE_SCALES CUDA_HOME 12.8 VLLM_USE_PRECOMPILED --torch-backend"
    " torch::nvtoolsext +cu128 VLLM_ROCM_USE_AITER_MHA=0 /v1/responses include_reasoning EXA_API_KEY"
    " PYTHON_EXECUTION_BACKEND=UV gpt_oss.evals 120b-low 120b-high aime25"
    " --eval --tensor_parallel_size --max-model-len max_tokens triton.language browser_server.py:mcp --enforce-eager"
)
WORDS = _WORDS.split()
PHRASES = (
    "PyTorch nightly",
    "--shm-size 32G",
    "--n-threads 128",
    "--gpu-memory-utilization 0.95 --max-num-batched-tokens 1024",
    "below 0.95",
    "Sinks must be of type float32",
    "--tool-server ip-1:port-1,ip-2:port-2",
    "mcp run -t sse",
    "63 GB and 14 GB",
    "as the best trade-off on H100 and H200",
    "uv pip install gpt-oss",
)


def of(model: str, device: str) -> list[Recipe]:
    return [each for each in RECIPES if (each.model, devices.label(each.device)) == (model, device)]


@pytest.mark.parametrize(("model", "device", "flags"), SET)
def test_what_still_holds_is_a_recipe(model: str, device: str, flags: dict[str, Any]) -> None:
    assert any(flags.items() <= recipe.config.items() for recipe in of(model, device))


@pytest.mark.parametrize(("model", "device"), PLAIN)
def test_what_needs_no_flag_has_a_recipe_without(model: str, device: str) -> None:
    assert any(list(recipe.config) == ["model"] for recipe in of(model, device))


def test_drafts_are_of_the_head_that_modal_names() -> None:
    heads = [recipe.config.get("speculative-config", {}) for recipe in of("20b", "H100")]
    assert any(
        (head.get("method"), head.get("model")) == ("eagle3", "RedHatAI/gpt-oss-20b-speculator.eagle3")
        for head in heads
    )


@pytest.mark.parametrize("device", ["MI300X", "R9700", "MI355X"])
def test_amd_has_aiter_where_it_runs_and_the_containers_flags(device: str) -> None:
    (recipe, *_) = of("20b", device)
    assert recipe.env.get("VLLM_ROCM_USE_AITER") == (None if device == "R9700" else "1")
    docker = render.docker(recipe)
    for flag in ("--ipc=host", "--device /dev/kfd", "--device /dev/dri", "--group-add video", ":8000:8000"):
        assert flag in docker


@pytest.mark.parametrize("said", [*WORDS, *PHRASES])
def test_what_changed_is_in_troubleshooting(said: str) -> None:
    assert said in PAGE


def test_the_models_are_as_announced() -> None:
    assert (GPT_OSS_120B.experts, GPT_OSS_20B.experts) == (128, 32)
    assert WINDOW == 128
    for model in (GPT_OSS_20B, GPT_OSS_120B):
        assert (model.active_experts, model.query_heads, model.kv_heads, model.head_size) == (4, 64, 8, 64)
    sizes = [round(model.weight_gib * 1.0737) for model in (GPT_OSS_120B, GPT_OSS_20B)]
    assert "the files have {} and {} GB".format(*sizes) in PAGE


def test_the_figures_against_two_gpus_are_those_of_the_recipes() -> None:
    measured = [
        f"{claim.tpot_ms:.2f}"
        for device in ("H200", "2xH200")
        for recipe in of("120b", device)
        if recipe.id.endswith("latency")
        for claim in recipe.claims
    ]
    (row,) = (line for line in PAGE.splitlines() if "as the best trade-off" in line)
    assert re.findall(r"\d\.\d\d", row) == measured


SCORES_120B = ("65.3", "72.4", "79.4", "51.2", "79.6", "93.0")
SCORES_20B = ("56.8", "67.5", "70.9", "38.8", "75.0", "85.8")


def test_scores_of_the_guide_are_where_they_are_compared_with() -> None:
    from vllm_gptoss.cli.eval import published

    text = Path(published.__file__).read_text()
    for score in (*SCORES_120B, *SCORES_20B):
        assert score in text
