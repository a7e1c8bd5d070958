"""One table names the GPUs: the driver's name and a user's spelling select the same row."""

from __future__ import annotations

import pytest

from vllm_gptoss.engine.choose import devices, families
from vllm_gptoss.engine.choose.device import Device, Vendor, without_gpu
from vllm_gptoss.engine.choose.devices import DeviceError


def test_every_device_has_a_family_and_every_family_a_device() -> None:
    found = {str(families.of(model.device())) for model in devices.MODELS}
    assert found == {family.name for family in families.FAMILIES}
    unserved = [name for name in ("V100", "T4", "A100", "MI300X") if families.unserved(devices.named(name))]
    assert unserved == ["V100", "T4"], "vLLM's MXFP4 needs sm_80"


@pytest.mark.parametrize(
    ("text", "label", "count"),
    [
        ("H100", "H100", 1),
        ("8xh100", "8xH100", 8),
        ("2 x RTX 4090", "2xRTX-4090", 2),
        ("4090", "RTX-4090", 1),
        ("rtx pro 6000", "RTX-PRO-6000", 1),
        ("mi355x", "MI355X", 1),
        ("GB10", "DGX-Spark", 1),
        ("NVIDIA H100 80GB HBM3", "H100", 1),
        ("NVIDIA H100 NVL", "H100-NVL", 1),
        ("2x NVIDIA A100-SXM4-40GB", "2xA100-40GB", 2),
        ("NVIDIA GeForce RTX 5090", "RTX-5090", 1),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000", 1),
        ("AMD Instinct MI300X", "MI300X", 1),
        ("NVIDIA H200 141GB", "H200", 1),
        ("2xRTX-4090-48G", "2xRTX-4090-48G", 2),
        ("RTX 4090D 48GB", "RTX-4090-D-48G", 1),
        ("NVIDIA GeForce RTX 5090 D v2", "RTX-5090-D-V2", 1),
        ("NVIDIA H20-3e", "H20-3e", 1),
        ("NVIDIA GB300", "GB300", 1),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX-4070-Ti-SUPER", 1),
        ("RTX3060", "RTX-3060", 1),
    ],
)
def test_what_a_user_types_is_understood(text: str, label: str, count: int) -> None:
    device = devices.named(text)
    assert devices.label(device) == label
    assert device.count == count


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("B2000", "there are H200, B200, GB200;"),
        ("9xH100", "1 to 8 H100"),
        ("toaster", "H100"),
        ("Gaudi 3", "there are H100, .* add --memory-gib"),
        ("MacBook Pro", "Apple"),
        ("Apple M3 Ultra", "Apple"),
        ("AMD Ryzen AI Max+ 395", "--device gfx1151 --memory-gib 96"),
        ("Jetson AGX Thor", "--device sm87"),
        ("2xDGX-Spark", "1 to 1"),
        ("NVIDIA RTX A1000", "there "),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "no device is called"),
    ],
)
def test_an_unknown_device_names_near_ones(text: str, said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        devices.named(text)


def test_the_memory_in_a_name_and_the_memory_given_replace_the_rows() -> None:
    assert devices.named("RTX-4090-48G").memory_gib == pytest.approx(47.3, abs=0.1)
    assert devices.named("V100-16GB").memory_gib == pytest.approx(15.8, abs=0.1)
    assert devices.named("H100 80GB") == devices.named("H100")
    assert devices.named("A100", 60.0).memory_gib == 60.0
    assert [devices.named("RTX-4080", gib).name for gib in (13.26, 13.27)] == ["RTX-4080-13G", "RTX-4080"]
    card = devices.named("2x sm89 card", 30.0)
    assert (card.arch, card.memory_gib, card.count) == ("sm89", 30.0, 2)
    assert devices.named("toaster", 30.0).arch == "unknown"
    assert devices.named("gfx1151", 96.0).vendor == "amd"
    with pytest.raises(DeviceError, match="Apple"):
        devices.named("M3", 64.0)
    assert devices.of(devices.named("RTX-4090-48G")) is None, "no recipe is of this card"


@pytest.mark.parametrize(
    ("vendor", "name", "arch", "memory", "row"),
    [
        ("nvidia", "NVIDIA H100 80GB HBM3", "sm90", 79.2, "H100"),
        ("nvidia", "NVIDIA H200", "sm90", 139.8, "H200"),
        ("nvidia", "NVIDIA GB200", "sm100", 184.0, "GB200"),
        ("nvidia", "NVIDIA GB10", "sm121", 119.7, "DGX-Spark"),
        ("nvidia", "NVIDIA A100-SXM4-80GB", "sm80", 79.3, "A100"),
        ("nvidia", "NVIDIA A100-SXM4-40GB", "sm80", 39.4, None),
        ("nvidia", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "sm120", 95.0, "RTX-PRO-6000"),
        ("nvidia", "NVIDIA GeForce RTX 3090", "sm86", 23.7, None),
        ("amd", "AMD Instinct MI300X", "gfx942", 191.5, "MI300X"),
        ("amd", "AMD Instinct MI325X", "gfx942", 230.32, "MI325X"),
        ("amd", "AMD Instinct MI325X", "gfx942", 230.31, None),
        ("amd", "AMD Radeon AI PRO R9700", "gfx1201", 31.9, "R9700"),
    ],
)
def test_the_drivers_name_finds_its_row(vendor: Vendor, name: str, arch: str, memory: float, row: str | None) -> None:
    found = devices.of(Device(vendor, name, arch, memory))
    assert (found and found.name) == row


def test_a_cpu_is_told_apart_by_amx() -> None:
    features = ({"amx", "avx512"}, {"avx2"})
    rows = [devices.of(Device("cpu", "any", "x86_64", 32, features=frozenset(each))) for each in features]
    assert [row and row.name for row in rows] == ["CPU-AMX", "CPU"]
    assert devices.of(without_gpu()) in rows, "this machine"
