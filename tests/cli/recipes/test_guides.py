"""Every setting in vLLM's guides, in both languages, its announcement and Modal's example is in a recipe, or in the
table of advice of troubleshooting, whose rows agree with the recipes, the defaults and vLLM's parser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support import warm
from vllm_gptoss.cli import main
from vllm_gptoss.cli.recipes import defaults, find, flags, load, probe, render
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
    ("120b", "MI355X", {"compilation-config": {"compile_sizes": [1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 4096, 8192]}}),
    ("20b", "H100", {"kv-cache-dtype": "fp8", "max-model-len": 2**15, "max-num-seqs": 32}),
    ("20b", "H100", {"tool-server": "demo"}),
)
"""Flags: model, device, and the settings of one of their recipes."""

PLAIN = (*(("20b", each) for each in ("A100", "H100", "H200", "B200")), *(("120b", each) for each in ("H200", "B200")))
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


def advice(page: str) -> list[list[str]]:
    """Cells (advice, what holds, what to do) of the page's last table."""
    lines = [line for line in page.rpartition("\n## ")[2].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


ADVICE = advice(PAGE)

FACTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("tensor_parallel_size", "120b-8xh100-evaluation", {"tensor-parallel-size": 8, "no-enable-prefix-caching": True}),
    ("expert parallelism", "120b-8xh100-throughput", {"data-parallel-size": 8, "enable-expert-parallel": True}),
    ("for throughput per GPU", "120b-8xh100-latency", {"tensor-parallel-size": 8}),
    ("best trade-off", "120b-2xh200-latency", {"tensor-parallel-size": 2}),
    ("the 120b on one H100", "120b-h100-latency", {"max-num-seqs": 64, "max-num-batched-tokens": 2048}),
    ("stream-interval: 20", "20b-h100-throughput", {"max-cudagraph-capture-size": 2048, "stream-interval": 20}),
    ("EAGLE3 with", "20b-h100-latency-eagle3", {"max-num-seqs": 32, "max-cudagraph-capture-size": 256}),
    ("Eagle3-v2", "120b-b200-latency-eagle3", {}),
    ("INT4", "120b-8xmi300x-latency", {"tensor-parallel-size": 8}),
    ("w-mxfp4-a-fp8", "120b-mi355x-latency", {"model": "openai/gpt-oss-120b"}),
)
"""A part of the advice, the recipe that its row names, and settings of that recipe."""


def row(part: str) -> list[str]:
    (found,) = (cells for cells in ADVICE if part in cells[0])
    return found


def test_there_is_one_table_of_advice_in_each_language() -> None:
    for page in (PAGE, (ROOT / "docs" / "zh" / "troubleshooting.md").read_text()):
        rows = advice(page)
        assert len(rows) == len(ADVICE) > 30
        assert [cells for cells in rows if len(cells) != 3 or not all(cells)] == []
    assert len(re.findall(r"^\| advice \|", PAGE, re.MULTILINE)) == 1


@pytest.mark.parametrize(("part", "name", "config"), FACTS)
def test_a_row_of_advice_names_a_recipe_with_its_settings(part: str, name: str, config: dict[str, Any]) -> None:
    assert f"`vllm-gptoss recipe show {name}`" in row(part)[2]
    assert config.items() <= find.by_id(RECIPES, name).config.items()


def test_every_recipe_and_command_in_the_advice_exists() -> None:
    do = "\n".join(cells[2] for cells in ADVICE)
    for name in set(re.findall(r"recipe (?:show|plan) (\S+?)[`\s]", do)) - {"ID"}:
        find.by_id(RECIPES, name)
    commands = re.findall(r"`vllm-gptoss ([^`]*)`", do)
    assert len(commands) > 10
    for line in commands:
        words = line.split()
        named = words[: 2 if words[0] in ("recipe", "tools") else 1]
        shown = CliRunner().invoke(main.app, [*named, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, line
        assert [flag for flag in re.findall(r"--[\w-]+", line) if flag not in shown.output] == [], line


def test_the_kernels_in_the_advice_are_those_of_the_recipes() -> None:
    attention, experts = (re.findall(r"`(\w+)`", row(part)[1]) for part in ("TRITON_ATTN_VLLM_V1", "matmul_ogs"))
    named = [["H100"], ["B200"], ["A100"]]
    kernels = [{recipe.entry.expects.attention for device in each for recipe in of("20b", device)} for each in named]
    assert kernels == [{name} for name in attention]
    named = [["H100", "H200", "2xH100", "2xH200"], ["4xH100", "8xH200"], ["B200"], ["A100"]]
    chosen = [{r.entry.expects.experts for device in each for r in of("120b", device)} for each in named]
    assert [name in each for name, each in zip(experts, chosen, strict=True)] == [True] * 4
    assert chosen[0] == {"gptoss"}
    assert chosen[1] == {"triton"}


def test_the_numbers_in_the_advice_are_the_defaults_and_the_recipes() -> None:
    (*_, fits, _) = row("the 120b on one H100")
    recipe = find.by_id(RECIPES, "120b-h100-latency")
    assert "gpu-memory-utilization" not in recipe.config
    numbers = (defaults.UTILIZATION, recipe.config["max-num-seqs"], recipe.config["max-num-batched-tokens"])
    assert fits == "it fits at vLLM's {} with {} requests and {:,} batched tokens".format(*numbers)
    for device in ("H100", "H200"):
        assert f"{defaults.batch(devices.named(device))[0]:,} is vLLM's default" in row("stream-interval: 20")[1]
    assert defaults.FIXED["max-model-len"] == 131072
    drafts = find.by_id(RECIPES, "20b-h100-latency-eagle3").config
    tokens = drafts["speculative-config"]["num_speculative_tokens"] + 1
    assert drafts["max-num-seqs"] * tokens == drafts["max-cudagraph-capture-size"]
    assert (
        f"graphs up to {drafts['max-cudagraph-capture-size']}: a request has {tokens} tokens" in row("EAGLE3 with")[1]
    )
    later = find.by_id(RECIPES, "120b-b200-latency-eagle3").config["speculative-config"]["model"]
    assert f"`{later}`" in row("Eagle3-v2")[1]
    amd = find.by_id(RECIPES, "120b-8xmi300x-latency")
    passes = amd.config["compilation-config"]
    for name in amd.env.keys() - {"VLLM_ROCM_USE_AITER"}:
        assert f"`{name}={amd.env[name]}`" in row("INT4")[0]
    assert all(f"`{name}`" in row("INT4")[0] for name in (*passes["pass_config"], "use_inductor_graph_partition"))
    assert passes["use_inductor_graph_partition"] is True
    assert {"full_cuda_graph", "enable_fi_allreduce_fusion", "enable_noop"} <= flags.RENAMED.keys()


def test_vllm_reads_and_refuses_what_the_advice_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "subprocess", warm.PROBING)
    fused = '{"pass_config": {"fuse_rope_kvcache": true}, "use_inductor_graph_partition": true}'
    accepted = [
        ["--quantization-config.moe.activation", "mxfp8"],
        ["--compilation-config", fused],
        ["--compilation-config", '{"pass_config": {"fuse_allreduce_rms": true, "eliminate_noops": true}}'],
        ["--tool-call-parser", "openai", "--enable-auto-tool-choice"],
        ["--tensor_parallel_size", "1", "--max-model-len", "131072"],
    ]
    refused = [
        ["--compilation-config", '{"full_cuda_graph": true}'],
        ["--compilation-config", '{"pass_config": {"enable_noop": true}}'],
        ["--compilation-config", '{"pass_config": {"enable_fi_allreduce_fusion": true}}'],
        ["--moe-backend", "flashinfer_trtllm_mxfp8"],
    ]
    lines = [["openai/gpt-oss-20b", *words] for words in (*accepted, *refused)]
    release = probe.ask([*lines, {"model": "openai/gpt-oss-20b", "host": "127.0.0.1", "port": 8000}])
    errors = [bool(parsed.error) for parsed in release.parsed]
    assert errors == [False] * len(accepted) + [True] * len(refused) + [False]
    assert release.parsed[-1].restated == ("port",)  # and 127.0.0.1 is not the default
    assert "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION" in release.variables
    assert "VLLM_ROCM_USE_AITER_MHA" in release.variables
    spans = [span for cells in ADVICE for span in re.findall(r"`(?!vllm-gptoss |pip )([^`]*)`", cells[2])]
    named = {flag for span in spans for flag in re.findall(r"--[\w-]+", span)}
    assert named - {"--security-opt"} <= release.flags


def test_the_first_start_in_the_guide_is_the_longest_of_the_results() -> None:
    """Of the plugin on one H100, `start_s` of each engine."""
    longest = {"20b": 0.0, "120b": 0.0}
    for path in (ROOT / "benchmarks" / "results").glob("decode-h100-*.json"):
        for engine in json.loads(path.read_text()).get("engines", ()):
            if engine["variant"] == "plugin" and engine["tensor_parallel"] == 1:
                longest[engine["model"]] = max(longest[engine["model"]], engine.get("start_s") or 0)
    guide = (ROOT / "docs" / "guide.md").read_text()
    assert "up to {:.0f} s for the 20b and {:.0f} s for the 120b".format(*longest.values()) in guide
