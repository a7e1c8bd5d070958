"""Choices are data with reasons; a requested choice that cannot run is an error with an alternative."""

from __future__ import annotations

import typing
from dataclasses import replace
from typing import Any

import pytest

from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import ChoiceError, Deployment, families
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.spec import GPT_OSS_20B, GPT_OSS_120B, ModelSpec
from vllm_gptoss.settings import Experts

AMX = frozenset({"amx", "avx512", "avx2"})
DEVICES = {
    "H200": Device("nvidia", "NVIDIA H200", "sm90", 139.8),
    "H100": Device("nvidia", "NVIDIA H100 80GB HBM3", "sm90", 79.6),
    "B200": Device("nvidia", "NVIDIA B200", "sm100", 178.0),
    "B300": Device("nvidia", "NVIDIA B300", "sm103", 267.0),
    "RTX 5090": Device("nvidia", "NVIDIA GeForce RTX 5090", "sm120", 31.8),
    "Spark": Device("nvidia", "NVIDIA GB10", "sm121", 119.7),
    "A100": Device("nvidia", "NVIDIA A100-SXM4-80GB", "sm80", 79.3),
    "L40S": Device("nvidia", "NVIDIA L40S", "sm89", 44.4),
    "RTX 3090": Device("nvidia", "NVIDIA GeForce RTX 3090", "sm86", 23.7),
    "MI300X": Device("amd", "AMD Instinct MI300X", "gfx942", 191.5),
    "MI355X": Device("amd", "AMD Instinct MI355X", "gfx950", 287.6),
    "R9700": Device("amd", "AMD Radeon AI PRO R9700", "gfx1201", 31.9),
    "CPU with AMX": Device("cpu", "Xeon", "x86_64", 24, features=AMX),
    "CPU with AVX2": Device("cpu", "Ryzen", "x86_64", 24, features=frozenset({"avx2"})),
    "unknown GPU": Device("nvidia", "V100", "sm70", 32),
}


def of(model: ModelSpec = GPT_OSS_20B, **changes: Any) -> Deployment:
    """A model on one GPU, with everything that is usual, but for `changes`."""
    return Deployment(model, **changes)


@pytest.mark.parametrize(
    ("name", "attention", "experts"),
    [
        ("B200", "FLASHINFER", "flashinfer_trtllm"),
        ("B300", "FLASHINFER", "flashinfer_trtllm"),
        ("RTX 5090", "upstream", "marlin"),
        ("Spark", "upstream", "marlin"),
        ("A100", "TRITON_ATTN", "marlin"),
        ("L40S", "TRITON_ATTN", "marlin"),
        ("RTX 3090", "TRITON_ATTN", "marlin"),
        ("MI300X", "upstream", "aiter"),
        ("MI355X", "upstream", "aiter"),
        ("R9700", "upstream", "upstream"),
        ("CPU with AMX", "CPU_ATTN", "native"),
        ("CPU with AVX2", "CPU_ATTN", "dequantize"),
        ("unknown GPU", "upstream", "upstream"),
    ],
)
def test_the_hardware_table(name: str, attention: str, experts: str) -> None:
    device, deployment = DEVICES[name], of(aiter=True)
    assert choose.attention(device, deployment).value == attention
    assert choose.experts(device, deployment).value == experts


@pytest.mark.parametrize("name", ["MI300X", "MI355X"])
def test_aiter_is_chosen_only_where_vllm_may_use_it(name: str) -> None:
    choice = choose.experts(DEVICES[name], of(aiter=False))
    assert choice.value == "upstream"
    assert "not aiter: VLLM_ROCM_USE_AITER is not set to 1" in choice.reason
    with pytest.raises(ChoiceError, match="VLLM_ROCM_USE_AITER is not set to 1"):
        choose.experts(DEVICES[name], of(aiter=False), "aiter")
    assert choose.experts(DEVICES[name], of(aiter=True), "aiter").value == "aiter"


@pytest.mark.parametrize("name", DEVICES)
def test_upstream_is_always_a_way_out(name: str) -> None:
    device = DEVICES[name]
    assert choose.experts(device, of(), "upstream").value == "upstream"
    assert choose.layers(device, of(), "upstream").value == "upstream"


@pytest.mark.parametrize("name", DEVICES)
def test_every_name_called_available_can_be_wished_for(name: str) -> None:
    device, family = DEVICES[name], choose.family(DEVICES[name])
    for deployment in (of(), of(aiter=True)):
        for wish in choose.available(family.experts, device, deployment):
            assert choose.experts(device, deployment, wish).value == wish
        for wish in choose.available(family.layers, device, deployment):
            assert choose.layers(device, deployment, wish).value == wish


def test_a_wish_that_cannot_be_met_names_what_can() -> None:
    with pytest.raises(ChoiceError, match=r"it is not made for NVIDIA H100 80GB HBM3 \(sm90, 80 GiB.*triton.*upstream"):
        choose.experts(DEVICES["H100"], of(), "flashinfer_trtllm_mxfp8")
    with pytest.raises(ChoiceError, match=r"experts='native' cannot run here: needs amx.*dequantize"):
        choose.experts(DEVICES["CPU with AVX2"], of(), "native")
    with pytest.raises(ChoiceError, match=r"layers='gptoss' cannot run here: the kernels are made for sm_90.*upstream"):
        choose.layers(DEVICES["A100"], of(), "gptoss")


def test_what_the_user_told_vllm_is_not_ours_to_choose() -> None:
    assert "--moe-backend marlin was asked for" in str(choose.experts(DEVICES["H200"], of(moe_backend="marlin")))
    given = choose.attention(DEVICES["H200"], of(attention_backend="TRITON_ATTN"))
    assert (given.value, given.reason) == ("TRITON_ATTN", "--attention-backend was given")


def test_attention_is_said_as_vllm_has_built_it() -> None:
    assert "reads sinks" in choose.attention(DEVICES["H200"], of(built_attention="FLASH_ATTN")).reason
    other = choose.attention(DEVICES["H200"], of(built_attention="FLEX_ATTENTION"))
    assert (other.value, other.reason) == ("FLEX_ATTENTION", "vLLM's own choice")


def test_lossy_choices_are_only_made_when_asked_for() -> None:
    assert choose.experts(DEVICES["B200"], of()).value == "flashinfer_trtllm"
    asked = choose.experts(DEVICES["B200"], of(), "flashinfer_trtllm_mxfp8")
    assert asked.reason.startswith("asked for")
    assert choose.kv_cache_dtype(DEVICES["H200"]).value == "auto"
    assert choose.kv_cache_dtype(DEVICES["H200"], "fp8").value == "fp8"


def test_our_experts_are_the_default_only_where_they_were_measured() -> None:
    for name in ("H200", "H100"):
        assert choose.experts(DEVICES[name], of(GPT_OSS_120B)).value == "gptoss"
        assert choose.experts(DEVICES[name], of(GPT_OSS_120B, tensor_parallel=2)).value == "gptoss"
        sharded = choose.experts(DEVICES[name], of(GPT_OSS_120B, tensor_parallel=4))
        assert sharded.value == "triton"
        assert "not gptoss: never run by us with more than 2 GPUs; experts=gptoss tries it" in sharded.reason
        assert choose.experts(DEVICES[name], of(GPT_OSS_120B, tensor_parallel=4), "gptoss").value == "gptoss"


def test_lora_on_a_cpu_is_left_to_vllm_which_refuses_it_at_start() -> None:
    choice = choose.experts(DEVICES["CPU with AVX2"], of(lora=True))
    assert choice.value == "upstream"
    assert "not dequantize: has no LoRA path" in choice.reason


def test_a_kv_cache_that_no_attention_with_sinks_reads_is_refused() -> None:
    with pytest.raises(ChoiceError, match=r"'nvfp4': no attention with sinks reads it.*auto, bfloat16, fp8"):
        choose.kv_cache_dtype(DEVICES["A100"], "nvfp4")
    assert choose.kv_cache_dtype(DEVICES["A100"], "fp8_e4m3").value == "fp8_e4m3"
    assert choose.kv_cache_dtype(DEVICES["unknown GPU"], "nvfp4").reason == "asked for; vLLM decides"


def test_parallelism_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ChoiceError, match="64 query heads do not divide over 3"):
        choose.attention(DEVICES["H200"], of(tensor_parallel=3))
    with pytest.raises(ChoiceError, match="32 experts do not divide over 5"):
        choose.experts(DEVICES["H200"], of(tensor_parallel=5, expert_parallel=True))


def devices(name: str, count: int) -> Device:
    return replace(DEVICES[name], count=count)


@pytest.mark.parametrize(
    ("device", "model", "ranks"),
    [
        (devices("H200", 1), GPT_OSS_120B, 1),
        (devices("H200", 8), GPT_OSS_120B, 2),
        (devices("H200", 8), GPT_OSS_20B, 1),
        (devices("H100", 1), GPT_OSS_120B, 1),
        (devices("B200", 8), GPT_OSS_120B, 1),
        (devices("RTX 5090", 4), GPT_OSS_120B, 4),
        (devices("RTX 5090", 1), GPT_OSS_20B, 1),
        (devices("A100", 2), GPT_OSS_120B, 1),
    ],
    ids=lambda value: str(value),
)
def test_parallelism_that_is_recommended(device: Device, model: object, ranks: int) -> None:
    assert choose.tensor_parallel(device, model).value == ranks  # type: ignore[arg-type]


def test_a_model_that_does_not_fit_says_so() -> None:
    assert "recipe plan" in choose.tensor_parallel(devices("RTX 3090", 2), GPT_OSS_120B).reason


def test_no_architecture_belongs_to_two_families() -> None:
    archs = [arch for family in choose.FAMILIES for arch in family.archs]
    assert len(archs) == len(set(archs))


def test_a_new_family_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Device("nvidia", "NVIDIA R100", "sm110", 288.0)
    assert choose.experts(new, of()).value == "upstream"
    entry = choose.GpuFamily("Rubin", ("sm110",), experts=(families.Row("marlin", "a guess"),))
    monkeypatch.setattr(families, "FAMILIES", (*choose.FAMILIES, entry))
    assert str(choose.experts(new, of())) == "marlin (a guess)"
    assert choose.layers(new, of()).value == "upstream"
    assert "made for sm_90, this GPU is sm_110" in choose.layers(new, of()).reason


def test_settings_offer_what_the_table_has_and_nothing_else() -> None:
    rows = {row.value for family in choose.FAMILIES for row in family.experts}
    assert rows | {"auto", "upstream"} == set(typing.get_args(Experts))
