"""Which attention, experts, KV-cache dtype and parallelism fit a device: pure tables that give a value and a reason.

Nothing here imports vLLM or torch. Values are vLLM's own names (`--moe-backend`, attention backend names) where
vLLM has the implementation, `gptoss` where we do, and `upstream` for "vLLM decides". Adding a GPU family is a row in
`FAMILIES` and a row in each table.

Sources: vLLM 0.33.0 `fused_moe/oracle/mxfp4.py` and `v1/attention/backends/*.py` (`supports_sink`, device checks) for
what runs where; benchmarks/results/ for what we measured; the gpt-oss usage guide of vLLM for parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from vllm_gptoss.device import Device
from vllm_gptoss.spec import ModelSpec

T = TypeVar("T")


class Family(StrEnum):
    """GPU generations that need different choices."""

    AMPERE_ADA = "Ampere/Ada"
    HOPPER = "Hopper"
    BLACKWELL = "Blackwell"
    BLACKWELL_RTX = "Blackwell RTX"
    CDNA3 = "CDNA3"
    CDNA4 = "CDNA4"
    RDNA4 = "RDNA4"
    CPU = "CPU"
    OTHER = "other"


FAMILIES: Final[Mapping[str, Family]] = {
    "sm80": Family.AMPERE_ADA,
    "sm86": Family.AMPERE_ADA,
    "sm87": Family.AMPERE_ADA,
    "sm89": Family.AMPERE_ADA,
    "sm90": Family.HOPPER,
    "sm100": Family.BLACKWELL,
    "sm103": Family.BLACKWELL,
    "sm120": Family.BLACKWELL_RTX,
    "sm121": Family.BLACKWELL_RTX,
    "gfx942": Family.CDNA3,
    "gfx950": Family.CDNA4,
    "gfx1201": Family.RDNA4,
}


class ChoiceError(ValueError):
    """An explicit wish that this device or configuration cannot meet; the message names what can."""


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """A decision and why it was made. `str()` is what logs and doctor print."""

    value: T
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Shape:
    """How the model is served.

    `kv_cache_dtype` is vLLM's name: `auto`, `bfloat16`, `fp8`, … `micro_batches`: dual-batch overlap, two steps on two
    streams at once.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: bool = False
    kv_cache_dtype: str = "auto"
    lora: bool = False
    micro_batches: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate of a family, in order of preference.

    `features` must all be on the device. `tensor_parallel` lists the sizes it was made for; empty means any.
    """

    value: str
    reason: str
    features: frozenset[str] = frozenset()
    tensor_parallel: tuple[int, ...] = ()
    lora: bool = True
    expert_parallel: bool = True
    micro_batches: bool = True
    by_wish_only: bool = False


_UPSTREAM = Row("upstream", "vLLM's own choice")

EXPERTS: Final[Mapping[Family, Sequence[Row]]] = {
    Family.HOPPER: (
        Row(
            "gptoss",
            "1.5 to 2.5 times matmul_ogs up to 32 evenly routed tokens on one H200, 1.2 up to 64; matmul_ogs beyond",
            tensor_parallel=(1, 2),
            lora=False,
            expert_parallel=False,
            micro_batches=False,
        ),
        Row("triton", "matmul_ogs, best stock backend of most batches on one H200"),
        Row("gptoss", "never run by us on more than two GPUs", lora=False, micro_batches=False, by_wish_only=True),
        Row("marlin", "best stock backend at batch 1 on one H200", by_wish_only=True),
        Row("humming", "best stock backend at batch 256 of 20b on one H200", by_wish_only=True),
        Row("flashinfer_cutlass", "not measured", by_wish_only=True),
    ),
    Family.BLACKWELL: (
        Row("flashinfer_trtllm", "BF16 activations: exact; never run by us on this family"),
        Row("flashinfer_trtllm_mxfp8", "MXFP8 activations: faster, lossy", by_wish_only=True),
        Row("flashinfer_cutlass", "not measured", by_wish_only=True),
        Row("triton", "not measured", by_wish_only=True),
        Row("marlin", "not measured", by_wish_only=True),
    ),
    Family.BLACKWELL_RTX: (
        Row(
            "marlin",
            "prefills faster than Triton in 99 KB of shared memory, says vLLM's oracle; never run by us",
        ),
        Row("triton", "not measured", by_wish_only=True),
        Row("flashinfer_cutlass", "not measured", by_wish_only=True),
    ),
    Family.AMPERE_ADA: (
        Row("marlin", "the only MXFP4 expert kernel of vLLM below sm90; never run by us on this family"),
        Row("humming", "not measured", by_wish_only=True),
    ),
    Family.CDNA3: (Row("aiter", "AITER MXFP4 with BF16 activations; never run by us"), _UPSTREAM),
    Family.CDNA4: (Row("aiter", "AITER MXFP4, pre-shuffled; never run by us"), _UPSTREAM),
    Family.RDNA4: (
        Row("upstream", "vLLM's oracle picks AITER-Triton or Triton; never run by us"),
        Row("triton", "not measured", by_wish_only=True),
    ),
    Family.CPU: (
        Row("native", "vLLM's CPU MXFP4 kernel: this CPU has AMX", features=frozenset({"amx"})),
        Row(
            "dequantize",
            "experts dequantised to BF16 at load, 3.8 times the memory: vLLM's CPU MXFP4 kernel needs AMX",
            lora=False,  # vLLM 0.32 takes Triton's experts for it, which fail on a CPU at the first step
        ),
    ),
    Family.OTHER: (_UPSTREAM,),
}

ATTENTION: Final[Mapping[Family, Sequence[Row]]] = {
    Family.HOPPER: (
        Row("FLASH_ATTN", "FlashAttention 3 reads sinks on sm90"),
        Row("FLASHINFER", "not measured", by_wish_only=True),
        Row("TRITON_ATTN", "not measured", by_wish_only=True),
    ),
    Family.BLACKWELL: (
        Row("FLASHINFER", "TRT-LLM kernels read sinks on sm100; never run by us"),
        Row("TRITON_ATTN", "not measured", by_wish_only=True),
    ),
    Family.BLACKWELL_RTX: (
        Row("upstream", "vLLM picks FlashInfer or Triton, both read sinks on sm120; never run by us"),
        Row("FLASHINFER", "not measured", by_wish_only=True),
        Row("TRITON_ATTN", "not measured", by_wish_only=True),
    ),
    Family.AMPERE_ADA: (Row("TRITON_ATTN", "the only backend of vLLM that reads sinks below sm90; never run by us"),),
    Family.CDNA3: (
        Row("upstream", "AITER unified attention when AITER is enabled, else Triton unified; never run by us"),
        Row("ROCM_AITER_UNIFIED_ATTN", "not measured", by_wish_only=True),
        Row("TRITON_ATTN", "not measured", by_wish_only=True),
    ),
    Family.CPU: (Row("CPU_ATTN", "vLLM's CPU attention reads sinks"),),
    Family.OTHER: (_UPSTREAM,),
}

KV_CACHE: Final[Mapping[Family, Mapping[str, str]]] = {
    Family.HOPPER: {"fp8": "FlashAttention 3 reads it and quantises the queries too"},
    Family.BLACKWELL: {"fp8": "TRT-LLM attention reads it"},
    Family.BLACKWELL_RTX: {"fp8": "FlashInfer reads it"},
    Family.AMPERE_ADA: {"fp8": "Triton attention reads it"},
    Family.CDNA3: {"fp8": "AITER or Triton attention reads it"},
    Family.CDNA4: {"fp8": "AITER or Triton attention reads it"},
    Family.RDNA4: {"fp8": "Triton attention reads it"},
    Family.CPU: {"fp8": "vLLM's CPU attention reads it"},
    Family.OTHER: {},
}
"""What a KV cache may be beside BF16, per family: all lossy, none measured by us, therefore only by wish."""


def family(device: Device) -> Family:
    """The family whose rows apply; `OTHER` for a GPU that no table knows."""
    return Family.CPU if device.vendor == "cpu" else FAMILIES.get(device.arch, Family.OTHER)


def experts(device: Device, spec: ModelSpec, shape: Shape, wish: str = "auto") -> Choice[str]:
    """The MXFP4 expert kernel: a name of `EXPERTS`, of which `gptoss`, `native` and `dequantize` are the plugin's.

    Raises:
        ChoiceError: `wish` is not `auto` and cannot run here.
    """
    if spec.experts % (shape.tensor_parallel if shape.expert_parallel else 1):
        raise ChoiceError(f"{spec.experts} experts do not divide over {shape.tensor_parallel} expert-parallel ranks")
    return _pick("experts", EXPERTS, device, shape, wish)


def attention(device: Device, spec: ModelSpec, shape: Shape, wish: str = "auto") -> Choice[str]:
    """The backend for attention with sinks: a name of `ATTENTION`.

    Raises:
        ChoiceError: `wish` is not `auto` and cannot run here, or the heads do not divide over the ranks.
    """
    if spec.query_heads % shape.tensor_parallel:
        raise ChoiceError(
            f"{spec.query_heads} query heads do not divide over {shape.tensor_parallel} tensor-parallel ranks"
        )
    return _pick("attention", ATTENTION, device, shape, wish)


def kv_cache_dtype(device: Device, wish: str = "auto") -> Choice[str]:
    """The KV cache's dtype: `auto` is BF16, as the model was trained; anything below is lossy and only by wish.

    Raises:
        ChoiceError: a wish that no attention with sinks of this family reads.
    """
    if wish in ("auto", "bfloat16"):
        return Choice(wish, "exact")
    table = KV_CACHE.get(family(device), {})
    why = next((why for name, why in table.items() if wish.startswith(name)), None)
    if why is None and family(device) is not Family.OTHER:
        there = ", ".join(["auto", "bfloat16", *table])
        raise ChoiceError(f"kv-cache-dtype {wish!r}: no attention with sinks reads it on {device}; there are {there}")
    return Choice(wish, f"asked for; {why or 'vLLM decides'}")


def tensor_parallel(device: Device, spec: ModelSpec) -> Choice[int]:
    """How many GPUs to shard over: a recommendation that doctor and recipes print; nothing enforces it."""
    need = spec.weight_gib * 1.1 + 4.0  # activations, CUDA graphs and a KV cache worth having
    sizes = [n for n in (1, 2, 4, 8) if n <= device.count]
    fitting = next((n for n in sizes if need / n <= device.memory_gib * 0.92), None)
    if family(device) is Family.CPU:
        return Choice(1, "one process uses all cores")
    if fitting is None:
        tight = f"{spec.name} needs about {need:.0f} GiB, {device.count} x {device.memory_gib:.0f} GiB are here"
        return Choice(sizes[-1], f"{tight}: set gpu-memory-utilization 0.95 and max-num-batched-tokens 1024")
    if family(device) is Family.HOPPER and spec.experts > 32 and fitting == 1 and device.count >= 2:
        return Choice(2, "vLLM's guide finds TP=2 the best trade-off for the 120b on Hopper; not measured by us")
    return Choice(fitting, "the fewest that hold the weights and a useful KV cache")


def available(table: Mapping[Family, Sequence[Row]], device: Device) -> list[str]:
    """Every name of `table` that can be wished for on `device`, `upstream` always among them."""
    rows = table.get(family(device)) or table[Family.OTHER]
    names = [row.value for row in rows if row.features <= device.features]
    return list(dict.fromkeys([*names, "upstream"]))


def _pick(what: str, table: Mapping[Family, Sequence[Row]], device: Device, shape: Shape, wish: str) -> Choice[str]:
    if wish == "upstream":
        return Choice("upstream", f"{what}=upstream was asked for")
    rows = table.get(family(device)) or table[Family.OTHER]
    passed: list[str] = []
    for row in rows:
        if wish not in ("auto", row.value) or (row.by_wish_only and wish == "auto"):
            continue
        if (obstacle := _obstacle(row, device, shape)) is None:
            return Choice(
                row.value,
                f"asked for; {row.reason}" if wish == row.value else "; ".join([row.reason, *passed]),
            )
        passed.append(f"not {row.value}: {obstacle}")
    if wish == "auto":
        return Choice("upstream", "; ".join(["vLLM's own choice", *passed]))
    why = passed[0].partition(": ")[2] if passed else f"it is not made for {device}"
    raise ChoiceError(
        f"{what}={wish!r} cannot run here: {why}. On this machine there are: {', '.join(available(table, device))}"
    )


def _obstacle(row: Row, device: Device, shape: Shape) -> str | None:
    if missing := row.features - device.features:
        return f"needs {', '.join(sorted(missing))}"
    if row.tensor_parallel and shape.tensor_parallel not in row.tensor_parallel:
        return f"made for tensor parallel {', '.join(map(str, row.tensor_parallel))}, not {shape.tensor_parallel}"
    if shape.lora and not row.lora:
        return "has no LoRA path"
    if shape.expert_parallel and not row.expert_parallel:
        return "has no expert-parallel path"
    if shape.micro_batches and not row.micro_batches:
        return "may not run on two streams at once, which dual-batch overlap does"
    return None
