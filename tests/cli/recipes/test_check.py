"""Each rule finds what breaks it, and leaves what is right alone."""

from __future__ import annotations

import dataclasses
import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from vllm_gptoss.cli.recipes import check, flags, load
from vllm_gptoss.cli.recipes.check import Case, Trouble
from vllm_gptoss.cli.recipes.probe import Parsed, Release
from vllm_gptoss.cli.recipes.schema import Recipe
from vllm_gptoss.engine.choose import devices
from vllm_gptoss.engine.spec import GPT_OSS_120B

BY_ID = {recipe.id: recipe for recipe in load.shipped()}
DAY = date(2026, 11, 23)
KNOWN = Release(
    "0.33.0",
    (),
    flags=frozenset({"--max-model-len"}),
    variables=frozenset(),
    attention_backends=frozenset(),
    cache_dtypes=frozenset(),
    speculative_keys=frozenset({"method"}),
    speculative_methods=frozenset(),
)


def changed(name: str, **entry: Any) -> Recipe:
    recipe = BY_ID[name]
    return dataclasses.replace(recipe, entry=recipe.entry.model_copy(update=entry))


def rules(found: list[Trouble]) -> set[str]:
    return {trouble.rule for trouble in found}


def case(device: str = "H100", env: dict[str, str] | None = None, **config: Any) -> Case:
    plain = {key.replace("_", "-"): value for key, value in config.items()}
    return Case("here", GPT_OSS_120B, devices.named(device), plain, env or {})


@pytest.mark.parametrize("recipe", BY_ID.values(), ids=list(BY_ID))
def test_every_recipe_is_what_the_tables_and_the_results_say(recipe: Recipe) -> None:
    assert not check.recipe(recipe, (), today=DAY)


def test_a_wrong_expectation_is_found_with_the_tables_reason() -> None:
    entry = BY_ID["20b-h100-latency"].entry
    wrong = changed("20b-h100-latency", expects=entry.expects.model_copy(update={"experts": "marlin"}))
    (found,) = check.recipe(wrong, ())
    assert found.rule == "expects"
    assert "'marlin', the tables choose gptoss (" in found.what


@pytest.mark.parametrize(
    ("config", "parsed", "said"),
    [
        ({"speculative_config": {"methud": 1}}, Parsed(""), "knows no 'methud'; did you mean method?"),
        ({}, Parsed("unrecognized arguments: --max-model-length=1"), "; did you mean --max-model-len?"),
        ({}, Parsed("", refused="no room"), "here (vLLM 0.33.0): refused at the start: no room"),
    ],
)
def test_what_a_release_refuses_is_found_with_its_remedy(config: dict[str, Any], parsed: Parsed, said: str) -> None:
    *_, found = check.command(case(**config), [(KNOWN, parsed)])
    assert found.fatal
    assert str(found).endswith(said)


def test_the_newest_release_decides_what_is_a_default() -> None:
    recipe = BY_ID["20b-h100-agent"]
    key = next(key for key in recipe.config if key != "model")
    (found,) = check.recipe(recipe, [(KNOWN, Parsed("")), (KNOWN, Parsed("", restated=(key,)))])
    assert (found.rule, found.what.partition(":")[0]) == ("defaults", key)


def test_gpus_that_stand_idle_are_found() -> None:
    assert rules(check.recipe(changed("120b-2xh200-latency", config={}), ())) >= {"gpus"}


def test_a_recipe_counts_with_numbers() -> None:
    for key, value in (("tensor-parallel-size", "two"), ("max-model-len", "8k"), ("max-num-seqs", True)):
        (found,) = check.recipe(changed("120b-2xh200-latency", config={key: value}), ())
        assert (found.rule, key in found.what) == ("numbers", True)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization 1.5 is refused at the start; it is above 0 and at"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization 0.0 is refused"),
        ({"max_num_seqs": 0}, "--max-num-seqs 0 is refused at the start; it is 1 or more"),
        ({"tensor_parallel_size": -2}, "--tensor-parallel-size -2 is refused"),
    ],
)
def test_a_number_that_the_engine_refuses_is_found(config: dict[str, Any], said: str) -> None:
    (found,) = check.command(case(**config), ())
    assert found.fatal
    assert said in str(found)
    recipe = changed("20b-h100-latency", config={key.replace("_", "-"): value for key, value in config.items()})
    assert [each.rule for each in check.recipe(recipe, ())] == ["numbers"]


def test_more_requests_than_batched_tokens_are_found() -> None:
    """vLLM 0.32 and 0.33, `config/scheduler.py`: refused; a default of requests is lowered instead."""
    (found,) = check.command(case(max_num_batched_tokens=512, max_num_seqs=513), ())
    assert (found.rule, found.fatal) == ("numbers", True)
    assert "--max-num-batched-tokens 512 is refused at the start: --max-num-seqs 513" in found.what
    (found,) = check.command(case("2xA100", tensor_parallel_size=2, max_num_seqs=4096), ())
    assert "--max-num-batched-tokens 2048 is refused" in found.what  # its default there
    assert not check.command(case(max_num_batched_tokens=512), ())
    assert not check.command(case(max_num_batched_tokens=512, max_num_seqs=512), ())


@pytest.mark.parametrize("device", ["V100", "T4"])
def test_a_gpu_that_is_too_old_for_the_experts_is_found(device: str) -> None:
    (found,) = check.command(case(device), ())
    assert found.fatal
    assert "from compute capability 8.0 (A100) on" in found.what
    assert not [each for each in check.command(case("8xA100"), ()) if "compute capability" in each.what]


def test_a_changed_figure_is_found(tmp_path: Path) -> None:
    recipe = BY_ID["20b-h100-latency"]
    wrong = dataclasses.replace(recipe, claims=(recipe.claims[0].model_copy(update={"tpot_ms": 1.03}),))
    (found,) = check.recipe(wrong, ())
    assert found.rule == "claims"
    assert "says 1.73" in found.what
    stock = dataclasses.replace(recipe, claims=(recipe.claims[0].model_copy(update={"stock_ms": 9.0}),))
    assert rules(check.recipe(stock, ())) == {"claims"}


def test_a_claim_of_other_flags_another_gpu_or_no_file_is_found() -> None:
    claims = BY_ID["20b-h200-latency"].claims
    more = dataclasses.replace(changed("20b-h200-latency", config={"max-num-seqs": 4}), claims=claims)
    assert rules(check.recipe(more, ())) == {"claims"}
    elsewhere = dataclasses.replace(BY_ID["20b-h100-latency"], claims=claims)
    assert any("measured on NVIDIA H200, not on H100" in each.what for each in check.recipe(elsewhere, ()))
    missing = dataclasses.replace(
        BY_ID["20b-h200-latency"], claims=(claims[0].model_copy(update={"results": "x.json"}),)
    )
    assert rules(check.recipe(missing, ())) == {"claims"}


def test_measurements_expire_at_a_release_only(tmp_path: Path) -> None:
    recipe = BY_ID["20b-h100-latency"]
    assert not check.recipe(recipe, ())
    old = check.recipe(recipe, (), today=date(2027, 6, 1))
    assert [each.rule for each in old] == ["release"]
    assert "190 days old" in old[0].what
    name = recipe.claims[0].results
    data = json.loads((check.RESULTS / name).read_text())
    (tmp_path / name).write_text(json.dumps({**data, "vllm": "0.32.0"}))
    older = check.recipe(recipe, (), tmp_path, DAY)
    assert [each.what for each in older] == [f"{name} is of vLLM 0.32.0, not 0.33"]


@pytest.mark.parametrize(
    ("device", "config", "said"),
    [
        ("H100", {"additional_config": {"gptoss": {"exprts": "x"}}}, "unknown gptoss setting 'exprts'"),
        ("H100", {"additional_config": {"gptoss": {"experts": "aiter"}}}, "cannot run here"),
        ("2xH100", {"tensor_parallel_size": 4}, "uses 4 GPUs, 2xH100 has 2"),
        ("8xH100", {"tensor_parallel_size": 6}, "64 query heads do not divide over 6"),
        ("H100", {"kv_cache_dtype": "nvfp4"}, "no attention with sinks reads it"),
    ],
)
def test_what_the_tables_refuse_is_found(device: str, config: dict[str, Any], said: str) -> None:
    assert any(said in each.what for each in check.settings_and_tables(case(device, **config)))


def test_a_backend_that_reads_no_sinks_there_is_found() -> None:
    for device, backend in (("A100", "FLASH_ATTN"), ("L40S", "FLASHINFER"), ("RTX-5090", "FLASH_ATTN")):
        (found,) = check.reads_sinks(case(device, attention_backend=backend))
        assert found.fatal
        assert f"--attention-backend {backend} reads no sinks on {device}" in found.what
    assert list(check.reads_sinks(case("H100", attention_backend="FLEX_ATTENTION")))
    for device, backend in (("A100", "TRITON_ATTN"), ("H100", "FLASH_ATTN"), ("B200", "FLASHINFER"), ("T4", "X")):
        assert not list(check.reads_sinks(case(device, attention_backend=backend)))


@pytest.mark.vllm
def test_backends_that_read_sinks_nowhere_say_so_themselves() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_gptoss.engine.choose import families

    for name in families.BLIND:
        assert not AttentionBackendEnum[name].get_class().supports_sink(), name


def test_aiter_named_while_it_is_off_is_found() -> None:
    named = {"attention_backend": "ROCM_AITER_UNIFIED_ATTN"}
    (found,) = check.aiter_is_on(case("MI300X", **named))
    assert "VLLM_ROCM_USE_AITER=1" in found.remedy
    assert not list(check.aiter_is_on(case("MI300X", {"VLLM_ROCM_USE_AITER": "1"}, **named)))
    assert list(check.aiter_is_on(case("MI300X", {"VLLM_ROCM_USE_AITER": "0"}, moe_backend="aiter")))


def test_a_cache_that_the_fused_layers_do_not_read_is_advice_where_it_costs_them_only() -> None:
    (found,) = check.keeps_fused_layers(case(kv_cache_dtype="fp8_e5m2"))
    assert not found.fatal
    assert not list(check.keeps_fused_layers(case()))
    assert not list(check.keeps_fused_layers(case(kv_cache_dtype="fp8")))
    assert not list(check.keeps_fused_layers(case("B200", kv_cache_dtype="fp8_e5m2")))
    assert not list(check.keeps_fused_layers(case("8xH100", kv_cache_dtype="fp8_e5m2", tensor_parallel_size=8)))


def test_async_scheduling_is_needless_and_an_error_beside_ngram() -> None:
    (found,) = check.needless(case(async_scheduling=True))
    assert not found.fatal
    (found,) = check.needless(case(async_scheduling=True, speculative_config={"method": "ngram"}))
    assert found.fatal
    assert not list(check.needless(case()))


def test_variables_before_a_command_belong_to_it() -> None:
    line = ["VLLM_ROCM_USE_AITER=1", "A=b=c", "vllm", "serve", "openai/gpt-oss-20b", "--port", "1"]
    assert flags.words(line) == ["openai/gpt-oss-20b", "--port", "1"]
    assert flags.variables(line) == {"VLLM_ROCM_USE_AITER": "1", "A": "b=c"}
    assert flags.words(["openai/gpt-oss-20b", "--x=1"]) == ["openai/gpt-oss-20b", "--x=1"]
    assert flags.variables(["--x=1"]) == {}


@pytest.mark.parametrize(
    "start",
    [
        "vllm serve",
        "/opt/venv/bin/vllm serve",
        "python -m vllm.entrypoints.openai.api_server",
        "VLLM_USE_V1=1 /usr/bin/python3.12 -m vllm.entrypoints.cli.main serve",
        "",
    ],
)
def test_every_way_to_start_a_server_is_understood(start: str) -> None:
    rest = ["--model", "openai/gpt-oss-20b", "--served-model-name", "vllm serve"]
    assert flags.words([*start.split(), *rest]) == rest


def test_no_words_after_the_command_are_none() -> None:
    assert flags.words(["vllm", "serve"]) == flags.words(["vllm"]) == []
