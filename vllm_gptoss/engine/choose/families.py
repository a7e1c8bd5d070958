"""GPU generations and what fits each, in order of preference. Adding a GPU family is one entry of `FAMILIES`.

Values are vLLM's own names (`--moe-backend`, attention backend names) where vLLM has the implementation, `gptoss` where
we do, and `upstream` for "vLLM decides".

Sources: vLLM 0.33.0 `fused_moe/oracle/mxfp4.py` and `v1/attention/backends/*.py` (`supports_sink`, device checks) for
what runs where; benchmarks/results/ for what we measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from vllm_gptoss.engine.choose import bands, conditions, measured
from vllm_gptoss.engine.choose.conditions import Condition
from vllm_gptoss.engine.choose.device import Device


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate.

    unless: conditions under which it cannot run; untried: conditions under which it was never run, so that it must be
    requested; by_wish_only: it must always be requested.
    """

    value: str
    reason: str
    unless: tuple[Condition, ...] = ()
    untried: tuple[Condition, ...] = ()
    by_wish_only: bool = False


def wished(value: str, reason: str = "not measured", unless: tuple[Condition, ...] = ()) -> Row:
    """A candidate that must be requested."""
    return Row(value, reason, unless, by_wish_only=True)


BLIND: Final = ("FLEX_ATTENTION",)
"""Attention backends of vLLM that read sinks on no GPU: `supports_sink`, 0.32.0 and 0.33.0."""

_UPSTREAM: Final = (Row("upstream", "vLLM's own choice"),)
_AITER: Final = (conditions.NO_AITER,)

_ON_AN_H200: Final = "run on an H200 as PTX, never on this family"
_OVER_MARLIN: Final = wished(
    "gptoss", f"our kernels for up to 64 tokens over Marlin's weights; {_ON_AN_H200}", conditions.EXPERTS_OVER_MARLIN
)

# Every family has them: their first condition is the supported GPU.
_LAYERS: Final = (
    Row(
        "gptoss",
        f"fused kernels for steps of up to {bands.FUSED_TOKENS} tokens",
        unless=conditions.LAYERS,
        untried=conditions.beyond(measured.SM90, whole=True),
    ),
)
_LAYERS_OF_VLLM: Final = (
    *_LAYERS,
    wished("attention", f"vLLM's, with our attention in decode steps; {_ON_AN_H200}", conditions.OVER_TRITON),
)
_ONE_TOKEN: Final = (
    Row("one launch", "all layers in one kernel", unless=conditions.ONE_LAUNCH),
    Row("six launches", "separate launches for each layer"),
)

_MANY_TOKENS: Final = (
    Row(bands.AROUND_CUBLAS, "our kernels around cuBLAS's products in decode steps", unless=conditions.AROUND),
    Row(bands.UPSTREAM, "vLLM's compiled layers"),
)

_RUNNER: Final = (
    Row("gptoss", "decode steps are replayed from CUDA graphs", unless=conditions.RUNNER),
    Row("upstream", "vLLM's runner prepares each step"),
)


@dataclass(frozen=True, slots=True)
class GpuFamily:
    """One GPU generation. archs: `Device.arch`; kv_cache: dtypes of a KV cache other than BF16, and their readers;
    blind: attention backends of vLLM that read no sinks there, in addition to `BLIND`."""

    name: str
    archs: tuple[str, ...]
    experts: tuple[Row, ...] = _UPSTREAM
    attention: tuple[Row, ...] = _UPSTREAM
    kv_cache: Mapping[str, str] = field(default_factory=dict)
    blind: tuple[str, ...] = ()
    layers: tuple[Row, ...] = _LAYERS
    one_token: tuple[Row, ...] = _ONE_TOKEN
    many_tokens: tuple[Row, ...] = _MANY_TOKENS
    runner: tuple[Row, ...] = _RUNNER

    def __str__(self) -> str:
        return self.name


FAMILIES: Final = (
    GpuFamily(
        "Hopper",
        ("sm90",),
        experts=(
            Row(
                "gptoss",
                f"1.5 to 2.5 times matmul_ogs up to {bands.MANY_TOKENS} evenly routed tokens on one"
                f" {measured.SM90.gpu}, 1.2 to 2.0 beyond",
                unless=conditions.EXPERTS,
                untried=conditions.beyond(measured.SM90, whole=False),
            ),
            Row("triton", f"matmul_ogs, best stock backend of most batches on one {measured.SM90.gpu}"),
            wished("marlin", f"best stock backend at batch 1 on one {measured.SM90.gpu}"),
            wished("humming", f"best stock backend at batch 256 of 20b on one {measured.SM90.gpu}"),
            wished("flashinfer_cutlass"),
        ),
        attention=(Row("FLASH_ATTN", "FlashAttention 3 reads sinks on sm90"),),
        kv_cache={"fp8": "FlashAttention 3 reads it and quantises the queries too"},
    ),
    GpuFamily(
        "Blackwell",
        ("sm100", "sm103"),
        experts=(
            Row("flashinfer_trtllm", "BF16 activations: exact; never run by us on this family"),
            wished("flashinfer_trtllm_mxfp8", "MXFP8 activations: faster, lossy"),
            wished("flashinfer_cutlass"),
            wished("triton"),
            wished("marlin"),
        ),
        attention=(Row("FLASHINFER", "TRT-LLM kernels read sinks on sm100; never run by us"),),
        kv_cache={"fp8": "TRT-LLM attention reads it"},
    ),
    GpuFamily(
        "Blackwell RTX",
        ("sm120", "sm121"),
        experts=(
            Row("marlin", "prefills faster than Triton in 99 KB of shared memory, by vLLM's oracle; never run by us"),
            _OVER_MARLIN,
            wished("triton"),
            wished("flashinfer_cutlass"),
        ),
        attention=(Row("upstream", "vLLM picks FlashInfer or Triton, both read sinks on sm120; never run by us"),),
        kv_cache={"fp8": "FlashInfer reads it"},
        blind=("FLASH_ATTN",),  # FlashAttention 2
        layers=_LAYERS_OF_VLLM,
    ),
    GpuFamily(
        "Ampere/Ada",
        ("sm80", "sm86", "sm87", "sm89"),
        experts=(
            Row("marlin", "the only MXFP4 expert kernel of vLLM below sm90; never run by us on this family"),
            _OVER_MARLIN,
            wished("humming"),
        ),
        attention=(Row("TRITON_ATTN", "the only backend of vLLM that reads sinks below sm90; never run by us"),),
        kv_cache={"fp8": "Triton attention reads it"},
        blind=("FLASH_ATTN", "FLASHINFER"),
        layers=_LAYERS_OF_VLLM,
    ),
    GpuFamily(
        "CDNA3",
        ("gfx942",),
        experts=(Row("aiter", "AITER MXFP4 with BF16 activations; never run by us", unless=_AITER), *_UPSTREAM),
        attention=(
            Row("upstream", "AITER unified attention when AITER is enabled, else Triton unified; never run by us"),
        ),
        kv_cache={"fp8": "AITER or Triton attention reads it"},
    ),
    GpuFamily(
        "CDNA4",
        ("gfx950",),
        experts=(Row("aiter", "AITER MXFP4, pre-shuffled; never run by us", unless=_AITER), *_UPSTREAM),
        kv_cache={"fp8": "AITER or Triton attention reads it"},
    ),
    GpuFamily(
        "RDNA4",
        ("gfx1201",),
        experts=(Row("upstream", "vLLM's oracle picks AITER-Triton or Triton; never run by us"), wished("triton")),
        kv_cache={"fp8": "Triton attention reads it"},
    ),
    GpuFamily(
        "CPU",
        (),
        experts=(
            Row("native", "vLLM's CPU MXFP4 kernel: this CPU has AMX", unless=(conditions.needs("amx"),)),
            Row(
                "dequantize",
                "experts dequantised to BF16 at load, 3.8 times the memory: vLLM's CPU MXFP4 kernel needs AMX",
                unless=(conditions.NO_LORA,),  # vLLM 0.32 takes Triton's experts for it: they fail at the first step
            ),
        ),
        attention=(Row("CPU_ATTN", "vLLM's CPU attention reads sinks"),),
        kv_cache={"fp8": "vLLM's CPU attention reads it"},
    ),
)

OTHER: Final = GpuFamily("other", ())
"""A GPU that no entry knows: vLLM decides everything."""


def of(device: Device) -> GpuFamily:
    """The entry of a device."""
    if device.vendor == "cpu":
        return next(family for family in FAMILIES if family.name == "CPU")
    return next((family for family in FAMILIES if device.arch in family.archs), OTHER)


def reads_sinks(device: Device, backend: str) -> bool:
    """Whether an attention backend of vLLM reads sinks on a device; True if unknown."""
    return backend not in (*BLIND, *of(device).blind)


LEAST_SM: Final = 80
"""vLLM 0.32.0 and 0.33.0, `quantization/mxfp4.py`: `get_min_capability`."""


def unserved(device: Device) -> str:
    """Why vLLM serves no gpt-oss on a GPU; empty if it does or if unknown."""
    number = device.arch.removeprefix("sm")
    if device.vendor != "nvidia" or not number.isdigit() or int(number) >= LEAST_SM:
        return ""
    return f"vLLM runs MXFP4 from compute capability 8.0 (A100) on, {device.name} is sm_{number}: no flag helps"
