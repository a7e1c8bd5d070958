"""A plan is within 5 % of every start that was measured, counts the cache as vLLM does, and advises only what fits."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gptoss.cli.recipes import check, load, memory
from vllm_gptoss.cli.recipes.memory import MEASURED, Cache, Start
from vllm_gptoss.cli.recipes.plan import Part, Plan, PlanError, plan, search
from vllm_gptoss.cli.recipes.schema import SPECS
from vllm_gptoss.engine.choose import Deployment, devices
from vllm_gptoss.engine.spec import GPT_OSS_20B, GPT_OSS_120B

BLOCK = {"20b": 393_216, "120b": 589_824}
"""Bytes of a block of 16 tokens on one GPU: 16 x 2 x 8 x 64 values of 2 bytes in each of half the layers."""


def planned(start: Start) -> Plan:
    """The plan of a measured start's settings."""
    spec = SPECS[start.model]
    spec = dataclasses.replace(spec, layers=start.layers) if start.layers else spec
    config: dict[str, Any] = {
        "max-num-batched-tokens": start.tokens,
        "max-num-seqs": start.requests,
        "max-model-len": start.length,
        "cudagraph-capture-sizes": list(range(start.graphs)),
        "tensor-parallel-size": start.count,
    }
    if start.experts != "gptoss":
        config["moe-backend"] = start.experts
    return plan(spec, devices.named(f"{start.count}x{start.device}"), config, {})


@pytest.mark.parametrize("start", MEASURED, ids=lambda start: f"{start.count}x{start.device}-{start.results}")
def test_the_kv_cache_is_what_was_measured(start: Start) -> None:
    assert planned(start).kv == pytest.approx(start.kv_gib, rel=0.05)


def test_a_plan_shows_the_start_that_is_nearest_in_its_flags() -> None:
    one = devices.named("H100")
    few = {"max-num-seqs": 64, "max-num-batched-tokens": 2048}
    nearest = {64: "latency", 3: "long", 1000: "latency"}
    for requests, said in nearest.items():
        found = plan(GPT_OSS_120B, one, {**few, "max-num-seqs": requests}, {}).measured
        assert f"-{said}-" in found.results
    driver = dataclasses.replace(one, name="NVIDIA H100 80GB HBM3")
    for device in (driver, one):
        assert plan(GPT_OSS_120B, device, few, {}).load_peak == Part("peak of loading", 61.90, "measured")
    assert plan(GPT_OSS_120B, devices.named("A100"), few, {}).load_peak.known == "estimated"
    assert plan(GPT_OSS_20B, one, {"speculative-config": {"method": "eagle3"}}, {}).measured is None


@pytest.mark.parametrize("start", MEASURED, ids=lambda start: f"{start.model}-{start.results}-{start.experts}")
def test_measured_starts_are_in_their_results(start: Start) -> None:
    data = json.loads((check.RESULTS / start.results).read_text())
    assert start.device in data["gpu"]
    shape = f"{start.model}:{start.layers}" if start.layers else start.model
    variant = "plugin" if start.experts == "gptoss" else start.experts
    every = (*data.get("engines", ()), *data["measurements"])
    named = [each for each in every if (each["model"], each["variant"]) == (shape, variant)]
    rounds = [each for each in named if each.get("kv_gib")]
    if rounds:
        assert start.kv_gib in {round(each["kv_gib"], 2) for each in rounds}
        assert start.load_peak_gib in {round(each["load_peak_gib"], 2) for each in rounds}
    else:  # older files count blocks alone
        blocks = {each["kv_blocks"] for group in named for each in group.get("rounds", []) if each.get("kv_blocks")}
        assert start.kv_gib in {round(each * BLOCK[start.model] / 2**30, 2) for each in blocks}


GPUS = [recipe for recipe in load.shipped() if recipe.device.vendor != "cpu"]


@pytest.mark.parametrize("recipe", GPUS, ids=lambda recipe: recipe.id)
def test_every_recipe_fits(recipe: Any) -> None:
    found = plan(recipe.spec, recipe.device, recipe.config, recipe.env)
    assert (found.why, found.fits) == ("", True)
    assert sum(part.gib for part in found.parts) == pytest.approx(found.budget)


@pytest.mark.vllm
@pytest.mark.parametrize("drafts", [None, "eagle3", "dflash"])
@pytest.mark.parametrize("model", SPECS)
def test_the_cache_is_grouped_and_counted_as_vllm_does(model: str, drafts: str | None) -> None:
    import torch
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec

    spec, length, in_flight = SPECS[model], 131_072, 16_384
    page = {"block_size": 16, "num_kv_heads": 8, "head_size": 64, "dtype": torch.bfloat16}
    layers: dict[str, Any] = {
        f"{layer}": FullAttentionSpec(**page) if layer % 2 else SlidingWindowSpec(**page, sliding_window=128)
        for layer in range(spec.layers)
    }
    drafted = memory.DRAFTS[drafts][1] if drafts else 0
    layers |= {f"draft{layer}": FullAttentionSpec(**page) for layer in range(drafted)}
    groups = kv_cache_utils._get_kv_cache_groups_uniform_page_size(layers)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=length),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        max_in_flight_tokens=in_flight,
    )
    ours = Cache.of(Deployment(spec, drafts=drafts), 16)
    size = max(len(group.layer_names) for group in groups)
    assert ours.block_bytes == size * FullAttentionSpec(**page).page_size_bytes
    theirs = KVCacheConfig(num_blocks=100_000, kv_cache_tensors=[], kv_cache_groups=groups)
    at_once = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, theirs)
    gib = 100_000 * ours.block_bytes / 2**30
    assert ours.requests(gib, length, in_flight) == pytest.approx(at_once)


def test_an_fp8_cache_and_two_gpus_each_halve_a_block() -> None:
    whole = Cache.of(Deployment(GPT_OSS_120B), 16).block_bytes
    assert whole == BLOCK["120b"]
    assert Cache.of(Deployment(GPT_OSS_120B, kv_cache_dtype="fp8"), 16).block_bytes == whole / 2
    assert Cache.of(Deployment(GPT_OSS_120B, tensor_parallel=2), 16).block_bytes == whole / 2


def test_experts_are_spread_by_tensor_and_expert_parallelism() -> None:
    alone = memory.weights(Deployment(GPT_OSS_120B), "triton")
    halved = memory.weights(Deployment(GPT_OSS_120B, tensor_parallel=2), "triton")
    spread = memory.weights(Deployment(GPT_OSS_120B, data_parallel=8, expert_parallel=True), "triton")
    assert alone.total == pytest.approx(61.4, abs=0.1)
    assert halved.experts == pytest.approx(alone.experts / 2, rel=0.03)  # 1,440 rows are rounded up to 1,472
    assert spread.experts == pytest.approx(alone.experts / 8)
    assert spread.rest == alone.rest


@pytest.mark.parametrize("device", ["RTX-5090", "L40S", "R9700"])
def test_no_flag_is_advised_where_only_more_gpus_help(device: str) -> None:
    found = plan(GPT_OSS_120B, devices.named(device), {}, {})
    assert not found.fits
    assert "are missing before there is any KV cache" in found.why
    assert all(each.startswith("--tensor-parallel-size") for each in found.advice)
    assert found.advice


def test_the_guides_flags_are_advised_where_they_help() -> None:
    """The usage guide's case: one H100, more batched tokens and requests than its memory has room for."""
    crowded = {"max-num-batched-tokens": 120_000, "max-num-seqs": 1024}
    found = plan(GPT_OSS_120B, devices.named("H100"), crowded, {})
    assert found.why == "one request of 131,072 tokens needs 9.0 GiB of KV cache, 1.3 are left"
    assert "--max-num-batched-tokens 1024" in found.advice  # without the guide's --gpu-memory-utilization 0.95
    more = plan(GPT_OSS_120B, devices.named("H100"), {**crowded, "max-num-seqs": 1025}, {})
    assert more.advice  # of which none has fewer batched tokens than requests, which vLLM refuses
    assert all("--max-num-seqs 16" in each for each in more.advice if "--max-num-batched-tokens" in each)
    assert plan(GPT_OSS_120B, devices.named("H100"), {}, {}).fits
    assert plan(GPT_OSS_20B, devices.named("H100"), {}, {}).advice == ()


@pytest.mark.parametrize(("device", "length"), [("2xA100-40GB", 8192), ("4xL4", 16_384)])
def test_a_combination_is_advised_where_no_single_setting_fits(device: str, length: int) -> None:
    """Of four settings on the first: any three of them do not fit."""
    (only,) = plan(GPT_OSS_120B, devices.named(device), {}, {}).advice
    assert f"--max-model-len {length}" in only
    assert {"--tensor-parallel-size", "--max-num-seqs", "--max-num-batched-tokens"} <= set(only.split())


@pytest.mark.parametrize(
    ("model", "device", "length", "users", "reached"),
    [
        ("20b", "2xL40S", 32_768, 20, True),
        ("120b", "2xL40S", 32_768, 20, False),
        ("120b", "8xH100", 131_072, 200, True),
        ("20b", "RTX-4090", 32_768, 1, True),
    ],
)
def test_users_get_settings_that_serve_them_or_the_nearest(
    model: str, device: str, length: int, users: int, reached: bool
) -> None:
    found = search(SPECS[model], devices.named(device), {"max-model-len": length}, {}, users)
    assert found is not None
    config, result = found
    assert plan(SPECS[model], devices.named(device), config, {}).fits
    assert (result.length >= length and result.requests >= users) == reached
    assert result.requests > users / 2


def test_what_fits_with_no_settings_has_no_nearest_and_an_alternative() -> None:
    assert search(GPT_OSS_120B, devices.named("RTX-3060"), {"max-model-len": 4096}, {}, 1) is None
    advice = {name: plan(GPT_OSS_120B, devices.named(name), {}, {}).advice for name in ("RTX-3060", "RTX-3090")}
    assert [["gpt-oss-20b" in each, "llama.cpp" in each] for (each,) in advice.values()] == [
        [False, True],
        [True, True],
    ]


def test_a_spark_shares_its_memory_with_the_host() -> None:
    device = devices.named("DGX-Spark")
    assert plan(GPT_OSS_120B, device, {}, {}).advice[0].startswith("--gpu-memory-utilization 0.85,")
    assert plan(GPT_OSS_120B, device, {"gpu-memory-utilization": 0.85}, {}).advice == ()
    config, _ = search(GPT_OSS_120B, device, {"max-model-len": 131_072}, {}, 200) or ({}, None)
    assert config["gpu-memory-utilization"] == 0.85, "most users, and no more memory"
    (advice,) = check.room_for_several(check.Case("here", GPT_OSS_20B, device, {}, {}))
    assert "0.92 may run out" in advice.what


def test_two_gpus_are_advised_to_stay_below_the_guides_limit() -> None:
    crowded = {"tensor-parallel-size": 2, "max-num-batched-tokens": 650_000, "max-num-seqs": 1024}
    found = plan(GPT_OSS_120B, devices.named("2xH100"), crowded, {})
    assert not found.fits
    assert found.advice
    assert not any("0.95" in each for each in found.advice)
    case = check.Case("here", GPT_OSS_120B, devices.named("2xH100"), {**crowded, "gpu-memory-utilization": 0.95}, {})
    assert [each.rule for each in check.room_for_several(case)] == ["utilization"]
    assert not list(check.room_for_several(dataclasses.replace(case, device=devices.named("2xH200"))))


def test_a_plan_that_fits_is_told_where_the_guide_ran_out() -> None:
    high = {"tensor-parallel-size": 2, "gpu-memory-utilization": 0.95}
    found = plan(GPT_OSS_120B, devices.named("2xH100"), high, {})
    assert found.fits
    assert [each.partition(":")[0] for each in found.advice] == ["stay below 0.95"]
    assert plan(GPT_OSS_120B, devices.named("2xH200"), high, {}).advice == ()
    assert plan(GPT_OSS_120B, devices.named("H100"), {"gpu-memory-utilization": 0.95}, {}).advice == ()


@pytest.mark.parametrize("device", [model.name for model in devices.MODELS if model.vendor != "cpu"])
@pytest.mark.parametrize("model", SPECS)
def test_every_advice_fits_when_it_is_taken(model: str, device: str) -> None:
    crowded = {"max-num-batched-tokens": 65_536, "max-num-seqs": 2048}
    found = plan(SPECS[model], devices.named(device), crowded, {})
    for each in found.advice:
        words = each.partition(",")[0].split()
        change = {key.removeprefix("--"): _number(value) for key, value in zip(words[::2], words[1::2], strict=True)}
        count = int(change.get("tensor-parallel-size", 1))
        assert plan(SPECS[model], devices.named(f"{count}x{device}"), {**crowded, **change}, {}).fits, each


def _number(text: str) -> Any:
    return int(text) if text.isdigit() else float(text) if text.replace(".", "").isdigit() else text


def test_a_cpu_is_no_gpu() -> None:
    with pytest.raises(PlanError, match=r"39 GiB of it are weights, VLLM_CPU_KVCACHE_SPACE .* --device"):
        plan(GPT_OSS_20B, devices.named("CPU"), {}, {})
    with pytest.raises(PlanError, match="no attention with sinks"):
        plan(GPT_OSS_20B, devices.named("CPU"), {"kv-cache-dtype": "nvfp4"}, {})


def test_weights_that_the_host_cannot_hold_are_found() -> None:
    host = dataclasses.replace(devices.named("CPU"), memory_gib=24.0)
    case = check.case_of({"model": "openai/gpt-oss-20b"}, host, {})
    (found,) = check.command(case, ())
    assert (found.rule, found.fatal) == ("host", False)
    assert "this host has 24" in found.what
    assert not check.command(dataclasses.replace(case, device=dataclasses.replace(host, memory_gib=64.0)), ())
    assert not check.command(check.case_of({"model": "/models/small"}, host, {}), ())


@pytest.mark.parametrize("value", ["many", "8k", -1, 0, True, None, 1.5, [1]])
def test_what_is_no_number_is_named_and_breaks_nothing(value: Any) -> None:
    config = {"max-model-len": value}
    with pytest.raises(PlanError, match="max-model-len: .* is no number to plan with"):
        plan(GPT_OSS_20B, devices.named("H100"), config, {})
    found = check.command(check.Case("here", GPT_OSS_20B, devices.named("H100"), config, {}), ())
    assert [each.rule for each in found] == ["numbers"] * (value == 0)  # the others no parser gives


@pytest.mark.parametrize(
    ("device", "config", "said"),
    [
        (
            "H100",
            {"gpu-memory-utilization": 1.5},
            "gpu-memory-utilization: 1.5 is no .* name one: above 0 and at most 1",
        ),
        ("H100", {"max-model-len": -1}, "max-model-len: 'auto' is no number"),
        ("2xH100", {"tensor-parallel-size": 4}, "uses 4 GPUs, 2xH100 has 2"),
        ("8xH100", {"tensor-parallel-size": 3}, "do not divide"),
        ("V100", {}, "vLLM runs MXFP4 from compute capability 8.0 .* V100 is sm_70"),
    ],
)
def test_what_then_fails_is_never_promised(device: str, config: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan(GPT_OSS_20B, devices.named(device), config, {})


def test_weights_that_are_larger_than_the_gpu_do_not_fit_whatever_the_cache() -> None:
    roomy = {"kv-cache-memory-bytes": 8 << 30}
    for gib, fits in ((80.0, True), (40.0, False)):
        device = dataclasses.replace(devices.named("H100"), memory_gib=gib)
        assert plan(GPT_OSS_120B, device, roomy, {}).fits is fits


def test_a_rule_finds_what_does_not_fit() -> None:
    case = check.Case("here", GPT_OSS_120B, devices.named("L40S"), {}, {})
    (found,) = check.fits(case)
    assert "does not fit L40S" in found.what
    assert "--tensor-parallel-size 2, on 2xL40S" in found.remedy
