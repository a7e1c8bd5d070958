"""Choices are data with reasons; an explicit wish that cannot be met is an error that names what can."""

from __future__ import annotations

import pytest

from vllm_gptoss import choose
from vllm_gptoss.choose import Choice, ChoiceError, Family, Shape
from vllm_gptoss.device import Device
from vllm_gptoss.spec import GPT_OSS_20B, GPT_OSS_120B

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


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_gets_an_answer_with_a_reason(name: str) -> None:
    device, shape = DEVICES[name], Shape()
    for choice in (
        choose.experts(device, GPT_OSS_20B, shape),
        choose.attention(device, GPT_OSS_20B, shape),
        choose.kv_cache_dtype(device),
        choose.tensor_parallel(device, GPT_OSS_20B),
    ):
        assert choice.value
        assert len(choice.reason) > 4


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
    device, shape = DEVICES[name], Shape()
    assert choose.attention(device, GPT_OSS_20B, shape).value == attention
    assert choose.experts(device, GPT_OSS_20B, shape).value == experts


@pytest.mark.parametrize("name", DEVICES)
def test_upstream_is_always_a_way_out(name: str) -> None:
    device = DEVICES[name]
    assert choose.experts(device, GPT_OSS_20B, Shape(), "upstream").value == "upstream"
    assert choose.attention(device, GPT_OSS_20B, Shape(), "upstream").value == "upstream"


@pytest.mark.parametrize("name", DEVICES)
def test_every_name_called_available_can_be_wished_for(name: str) -> None:
    device = DEVICES[name]
    for wish in choose.available(choose.EXPERTS, device):
        assert choose.experts(device, GPT_OSS_20B, Shape(), wish).value == wish
    for wish in choose.available(choose.ATTENTION, device):
        assert choose.attention(device, GPT_OSS_20B, Shape(), wish).value == wish


def test_a_wish_that_cannot_be_met_names_what_can() -> None:
    with pytest.raises(ChoiceError, match=r"experts='flashinfer_trtllm_mxfp8' cannot run here.*H100.*triton.*upstream"):
        choose.experts(DEVICES["H100"], GPT_OSS_20B, Shape(), "flashinfer_trtllm_mxfp8")
    with pytest.raises(ChoiceError, match=r"experts='native' cannot run here: needs amx.*dequantize"):
        choose.experts(DEVICES["CPU with AVX2"], GPT_OSS_20B, Shape(), "native")
    with pytest.raises(ChoiceError, match=r"attention='FLASH_ATTN' cannot run here.*TRITON_ATTN"):
        choose.attention(DEVICES["A100"], GPT_OSS_20B, Shape(), "FLASH_ATTN")


def test_lossy_choices_are_only_made_when_asked_for() -> None:
    assert choose.experts(DEVICES["B200"], GPT_OSS_20B, Shape()).value == "flashinfer_trtllm"
    asked = choose.experts(DEVICES["B200"], GPT_OSS_20B, Shape(), "flashinfer_trtllm_mxfp8")
    assert asked.reason.startswith("asked for")
    assert choose.kv_cache_dtype(DEVICES["H200"]).value == "auto"
    assert choose.kv_cache_dtype(DEVICES["H200"], "fp8").value == "fp8"


def test_our_experts_are_the_default_only_where_they_were_measured() -> None:
    for name in ("H200", "H100"):
        assert choose.experts(DEVICES[name], GPT_OSS_120B, Shape()).value == "gptoss"
        assert choose.experts(DEVICES[name], GPT_OSS_120B, Shape(tensor_parallel=2)).value == "gptoss"
        sharded = choose.experts(DEVICES[name], GPT_OSS_120B, Shape(tensor_parallel=4))
        assert sharded.value == "triton"
        assert "not gptoss: made for tensor parallel 1, 2, not 4" in sharded.reason
        assert choose.experts(DEVICES[name], GPT_OSS_120B, Shape(tensor_parallel=4), "gptoss").value == "gptoss"
    overlapped = choose.experts(DEVICES["H200"], GPT_OSS_20B, Shape(micro_batches=True))
    assert overlapped.value == "triton"
    assert "two streams" in overlapped.reason
    with pytest.raises(ChoiceError, match="no LoRA path"):
        choose.experts(DEVICES["H200"], GPT_OSS_20B, Shape(lora=True), "gptoss")
    assert choose.experts(DEVICES["H200"], GPT_OSS_20B, Shape(lora=True)).value == "triton"


def test_lora_on_a_cpu_is_left_to_vllm_which_refuses_it_at_start() -> None:
    choice = choose.experts(DEVICES["CPU with AVX2"], GPT_OSS_20B, Shape(lora=True))
    assert choice.value == "upstream"
    assert "not dequantize: has no LoRA path" in choice.reason


def test_a_kv_cache_that_no_attention_with_sinks_reads_is_refused() -> None:
    with pytest.raises(ChoiceError, match=r"'nvfp4': no attention with sinks reads it.*auto, bfloat16, fp8"):
        choose.kv_cache_dtype(DEVICES["A100"], "nvfp4")
    assert choose.kv_cache_dtype(DEVICES["A100"], "fp8_e4m3").value == "fp8_e4m3"
    assert choose.kv_cache_dtype(DEVICES["unknown GPU"], "nvfp4").reason == "asked for; vLLM decides"


def test_parallelism_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ChoiceError, match="64 query heads do not divide over 3"):
        choose.attention(DEVICES["H200"], GPT_OSS_20B, Shape(tensor_parallel=3))
    with pytest.raises(ChoiceError, match="32 experts do not divide over 5"):
        choose.experts(DEVICES["H200"], GPT_OSS_20B, Shape(tensor_parallel=5, expert_parallel=True))


def devices(name: str, count: int) -> Device:
    one = DEVICES[name]
    return Device(one.vendor, one.name, one.arch, one.memory_gib, count, "nvlink")


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
    assert "gpu-memory-utilization" in choose.tensor_parallel(devices("RTX 3090", 2), GPT_OSS_120B).reason


def test_every_family_of_the_hardware_table_has_rows() -> None:
    for family in Family:
        assert family in choose.EXPERTS
    assert set(choose.FAMILIES.values()) <= set(choose.EXPERTS)


def test_a_choice_prints_its_reason() -> None:
    assert str(Choice("triton", "because")) == "triton (because)"
