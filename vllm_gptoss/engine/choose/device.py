"""`detect()` describes this machine as plain data, once per process.

The function imports torch, the module does not: vLLM imports the plugin in processes that must stay light.
"""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass, field
from typing import Literal

Vendor = Literal["nvidia", "amd", "cpu"]


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of accelerator and how many there are.

    `arch` is `sm90`, `sm100`, … for NVIDIA, `gfx942`, … for AMD, the machine name (`x86_64`) for a CPU.
    `memory_gib` is per device.
    `features` are lower-case facts that choices depend on: `amx`, `avx512`, `avx2`.
    """

    vendor: Vendor
    name: str
    arch: str
    memory_gib: float
    count: int = 1
    features: frozenset[str] = field(default_factory=frozenset)

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{times}{self.name} ({self.arch}, {self.memory_gib:.0f} GiB)"


@functools.cache
def detect() -> Device:
    """The accelerators that this process sees; the CPU when there are none."""
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() > 0:
        return _amd() if torch.version.hip else _nvidia()
    return without_gpu()


def _nvidia() -> Device:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return Device(
        vendor="nvidia",
        name=properties.name,
        arch=os.environ.get("GPTOSS_TEST_ARCH") or f"sm{properties.major}{properties.minor}",
        memory_gib=properties.total_memory / 2**30,
        count=torch.cuda.device_count(),
    )


def _amd() -> Device:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return Device(
        vendor="amd",
        name=properties.name,
        arch=properties.gcnArchName.split(":")[0],
        memory_gib=properties.total_memory / 2**30,
        count=torch.cuda.device_count(),
    )


def without_gpu() -> Device:
    """The CPU of this machine."""
    flags, model, memory_kib = _proc_cpu()
    names = {"amx_tile": "amx", "avx512f": "avx512", "avx512_bf16": "avx512_bf16", "avx2": "avx2"}
    return Device(
        vendor="cpu",
        name=model,
        arch=platform.machine(),
        memory_gib=memory_kib / 2**20,
        features=frozenset(feature for flag, feature in names.items() if flag in flags),
    )


def _proc_cpu() -> tuple[frozenset[str], str, int]:
    """Flags, model name and memory in KiB, from /proc; empty where there is none (macOS)."""
    flags: frozenset[str] = frozenset()
    model, memory = platform.processor() or platform.machine(), 0
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            for line in cpuinfo:
                key, _, value = line.partition(":")
                if key.strip() == "flags" and not flags:
                    flags = frozenset(value.split())
                elif key.strip() == "model name":
                    model = value.strip()
                if not line.strip():
                    break
        with open("/proc/meminfo") as meminfo:
            memory = next(int(line.split()[1]) for line in meminfo if line.startswith("MemTotal"))
    except OSError:
        pass
    return flags, model, memory
