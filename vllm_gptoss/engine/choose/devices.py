"""The GPUs that have a name: one table for recipes, the memory planner and doctor.

Memory is what `torch.cuda.get_device_properties` reports, in GiB, which is less than what is sold; 0: the host's.
`measured` rows were read from a GPU by us. The others are the makers' data sheets less what the driver keeps.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import Final

from vllm_gptoss.engine.choose.device import Device, Vendor


class DeviceError(ValueError):
    """A device that the table does not know; the message names near ones."""


@dataclass(frozen=True, slots=True)
class Model:
    """One GPU as it is called. most: how many one host has; also: other spellings, matched within a longer name."""

    name: str
    vendor: Vendor
    arch: str
    memory_gib: float
    most: int = 8
    also: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()
    measured: bool = False

    def device(self, count: int = 1) -> Device:
        """So many of them in one host."""
        return Device(self.vendor, self.name, self.arch, self.memory_gib, count, self.features)


MODELS: Final = (
    Model("H100", "nvidia", "sm90", 79.2, measured=True),
    Model("H200", "nvidia", "sm90", 139.8, measured=True),
    Model("A100", "nvidia", "sm80", 79.2, also=("A100-SXM4-80GB", "A100-80GB")),
    Model("L40S", "nvidia", "sm89", 44.4),
    Model("RTX-4090", "nvidia", "sm89", 23.5, also=("4090",)),
    Model("RTX-5090", "nvidia", "sm120", 31.3, also=("5090",)),
    Model("RTX-PRO-6000", "nvidia", "sm120", 94.9, also=("PRO-6000",)),
    Model("DGX-Spark", "nvidia", "sm121", 119.6, most=1, also=("GB10", "Spark")),
    Model("B200", "nvidia", "sm100", 178.3),
    Model("GB200", "nvidia", "sm100", 184.0, most=4),
    Model("B300", "nvidia", "sm103", 267.6),
    Model("MI300X", "amd", "gfx942", 191.9),
    Model("MI325X", "amd", "gfx942", 255.9),
    Model("MI355X", "amd", "gfx950", 287.9),
    Model("R9700", "amd", "gfx1201", 31.8, also=("AI-PRO-R9700",)),
    Model("CPU", "cpu", "x86_64", 0.0, most=1, features=frozenset({"avx512"})),
    Model("CPU-AMX", "cpu", "x86_64", 0.0, most=1, features=frozenset({"amx", "avx512"})),
)

NEIGHBOURS: Final = (
    Model("H20", "nvidia", "sm90", 95.1),
    Model("H20-3e", "nvidia", "sm90", 139.8),
    Model("H800", "nvidia", "sm90", 79.2),
    Model("H100-NVL", "nvidia", "sm90", 93.1),
    Model("GH200", "nvidia", "sm90", 94.5, most=4),
    Model("A100-40GB", "nvidia", "sm80", 39.4, also=("A100-SXM4-40GB", "A100-PCIE-40GB")),
    Model("A800", "nvidia", "sm80", 79.2),
    Model("A10", "nvidia", "sm86", 22.1, also=("A10G",)),
    Model("A40", "nvidia", "sm86", 44.4),
    Model("RTX-A6000", "nvidia", "sm86", 47.4, also=("A6000",)),
    Model("RTX-3090", "nvidia", "sm86", 23.6, also=("3090",)),
    Model("RTX-4090-D", "nvidia", "sm89", 23.5, also=("4090D", "4090-D")),
    Model("RTX-5090-D", "nvidia", "sm120", 31.3, also=("5090D", "5090-D")),
    Model("RTX-5090-D-V2", "nvidia", "sm120", 23.5, also=("5090D-V2", "5090-D-V2")),
    Model("L4", "nvidia", "sm89", 22.0),
    Model("RTX-A5000", "nvidia", "sm86", 23.6, also=("A5000",)),
    Model("A30", "nvidia", "sm80", 23.5),
    Model("RTX-3080", "nvidia", "sm86", 9.6, also=("3080",)),
    Model("RTX-3060", "nvidia", "sm86", 11.6, also=("3060",)),
    Model("L20", "nvidia", "sm89", 44.4),
    Model("L40", "nvidia", "sm89", 44.4),
    Model("RTX-6000-Ada", "nvidia", "sm89", 47.4),
    Model("RTX-4080", "nvidia", "sm89", 15.6, also=("4080",)),
    Model("RTX-4070", "nvidia", "sm89", 11.6, also=("4070",)),
    Model("RTX-4070-Ti-SUPER", "nvidia", "sm89", 15.6, also=("4070-Ti-SUPER",)),
    Model("RTX-4060-Ti", "nvidia", "sm89", 15.6, also=("4060-Ti",)),
    Model("RTX-PRO-5000", "nvidia", "sm120", 47.4),
    Model("RTX-PRO-4500", "nvidia", "sm120", 31.4),
    Model("RTX-5070-Ti", "nvidia", "sm120", 15.5, also=("5070-Ti",)),
    Model("RTX-5060-Ti", "nvidia", "sm120", 15.5, also=("5060-Ti",)),
    Model("RTX-5080", "nvidia", "sm120", 15.5, also=("5080",)),
    Model("RTX-5070", "nvidia", "sm120", 11.6, also=("5070",)),
    Model("GB300", "nvidia", "sm103", 267.6, most=4),
    Model("MI300A", "amd", "gfx942", 127.5, most=4),
    Model("MI308X", "amd", "gfx942", 191.9),
    Model("MI350X", "amd", "gfx950", 287.9),
    Model("RX-9070-XT", "amd", "gfx1201", 15.9, also=("9070-XT",)),
    Model("V100", "nvidia", "sm70", 31.7),
    Model("T4", "nvidia", "sm75", 14.6),
)
"""GPUs without a recipe. Their name selects the recipes of the family and a plan for their memory.

Sources: for the RTX 4090 D hardwaredb.net/geforce-rtx-4090-d-benchmark (24 GiB); for both RTX 5090 D Tom's Hardware,
2025-08-12 (32 and 24 GB); for the H20-3e github.com/NVIDIA/nccl/issues/2238 (sm_90, 141 GiB).
"""

LLAMA: Final = "llama.cpp serves gpt-oss there"
ELSEWHERE: Final = {
    r"apple|mac\w*|m[1-9]": f"vLLM has no kernels for Apple's GPUs; {LLAMA}",
    r"strix|8060s|ryzen|gfx115\d": f"not run by us; `--device gfx1151 --memory-gib 96` plans for it; {LLAMA} too",
    r"jetson|orin|thor": f"not run by us; `--device sm87 --memory-gib 60` plans for an Orin; {LLAMA} too",
}
"""Machines that users ask for, by a word of their name. docs.vllm.ai lists gfx1151, and another plugin for Apple."""

_COUNTED = re.compile(r"(?:(\d+)\s*[x*×]\s*)?(.+)", re.IGNORECASE)
_MARKED = re.compile(r"(?<![a-z0-9])(\d+)\s*gb?(?![a-z0-9])", re.IGNORECASE)
"""The memory in a card's name, as in `A100-SXM4-40GB` and `RTX-4090-48G`, in GB."""
_ARCH = re.compile(r"(sm\d{2,3}|gfx[0-9a-f]+)", re.IGNORECASE)

REPORTED: Final = 0.985
"""GiB that torch reports for each GB of a card's name: the rows above."""


def named(text: str, memory_gib: float = 0.0) -> Device:
    """`H100`, `8xH100`, `2 x rtx 4090`, or the driver's name (`NVIDIA H100 80GB HBM3`), as a device.

    memory_gib: of one GPU, instead of the row's; with it, a GPU without a row is accepted.

    Raises:
        DeviceError: no row has that name, or no host has so many.
    """
    found = _COUNTED.fullmatch(text.strip())
    count, name = (int(found[1] or 1), found[2]) if found else (1, text)
    known = (*MODELS, *NEIGHBOURS)
    same = [model for model in known if _plain(name) in {_plain(each) for each in (model.name, *model.also)}]
    within = [] if "laptop" in _words(name) else _within(name)
    model = same[0] if same else max(within, key=lambda each: each[0], default=(0, None))[1]
    why = [why for word, why in ELSEWHERE.items() if any(re.fullmatch(word, each) for each in _words(name))]
    if model is None and why and not (memory_gib and _ARCH.search(name)):
        raise DeviceError(f"{name}: {why[0]}")
    if model is None and not memory_gib:
        raise _unknown(name)
    if not 1 <= count <= (model.most if model else 8):
        raise DeviceError(f"{text}: one host has 1 to {model.most if model else 8} {model.name if model else name}")
    if model is None:
        arch = found[0].lower() if (found := _ARCH.search(name)) else "unknown"
        return Device("amd" if arch.startswith("gfx") else "nvidia", name, arch, memory_gib, count)
    marked = REPORTED * int(found[1]) if (found := _MARKED.search(name)) else 0.0
    memory = memory_gib or marked
    if model.vendor == "cpu" or abs(memory - model.memory_gib) < 0.15 * model.memory_gib:
        return replace(model.device(count), memory_gib=memory_gib or model.memory_gib)
    if not memory:
        return model.device(count)
    return replace(model.device(count), name=f"{model.name}-{memory / REPORTED:.0f}G", memory_gib=memory)


def _unknown(name: str) -> DeviceError:
    near = difflib.get_close_matches(_plain(name), [_plain(each.name) for each in MODELS], n=3, cutoff=0.6)
    names = [each.name for each in MODELS if _plain(each.name) in near] or [each.name for each in MODELS]
    return DeviceError(
        f"no device is called {name!r}; there {'is' if len(names) == 1 else 'are'} {', '.join(names)};"
        " for another GPU add --memory-gib, and its architecture to the name, as in sm89"
    )


def _within(name: str) -> list[tuple[int, Model]]:
    """Rows with a spelling whose words are all within a driver's name, and the number of these words."""
    said = _words(name)
    return [
        (len(spelt), model)
        for model in (*MODELS, *NEIGHBOURS)
        for spelt in map(_words, (model.name, *model.also))
        if any(said[start : start + len(spelt)] == spelt for start in range(len(said)))
    ]


def of(device: Device) -> Model | None:
    """The row with recipes of a detected device: its name is within the driver's (`NVIDIA H100 80GB HBM3`)."""
    if device.vendor == "cpu":
        return next(
            model
            for model in MODELS
            if model.vendor == "cpu" and ("amx" in model.features) == ("amx" in device.features)
        )
    alike = [
        model
        for _, model in _within(device.name)
        if model.arch == device.arch and abs(model.memory_gib - device.memory_gib) < 0.1 * model.memory_gib
    ]
    nearest = max(alike, key=lambda model: len(model.name), default=None)
    return nearest if nearest in MODELS else None  # an RTX 4090 D is no RTX 4090


def label(device: Device) -> str:
    """`8xH100`, as `named` reads it."""
    return f"{device.count}x{device.name}" if device.count > 1 else device.name


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("amd")
