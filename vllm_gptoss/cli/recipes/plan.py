"""Does it fit, how many requests at once, what to turn where it does not: one GPU's memory before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from vllm_gptoss.cli.recipes import defaults, memory
from vllm_gptoss.cli.recipes.deployment import bounds, choices, deployment, gpus, no_numbers, size
from vllm_gptoss.cli.recipes.memory import Cache, Start
from vllm_gptoss.cli.recipes.schema import SPECS
from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import devices
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.spec import ModelSpec

MEASURED = "measured"
ESTIMATED = "estimated"
CALCULATED = "calculated"


class PlanError(ValueError):
    """A configuration that cannot be planned; the message says why."""


@dataclass(frozen=True, slots=True)
class Part:
    """GiB of one GPU, and how it is known."""

    name: str
    gib: float
    known: str


@dataclass(frozen=True)
class Plan:
    """Memory of one of `gpus` GPUs. parts add up to `budget`, the share of `total` that vLLM may take.

    length: of the longest request; requests: so long, at once, on each replica; least: GiB that one of them needs.
    """

    device: Device
    total: float
    utilization: float
    parts: tuple[Part, ...]
    kv: float
    load_peak: Part
    least: float
    length: int
    tokens: int
    requests: float
    replicas: int
    measured: Start | None
    advice: tuple[str, ...] = ()

    @property
    def budget(self) -> float:
        return self.total * self.utilization

    @property
    def fits(self) -> bool:
        """vLLM starts where one request of full length fits; the weights must fit before it looks."""
        return self.kv >= self.least and self.parts[0].gib + memory.OVERHEADS.context < self.total

    @property
    def why(self) -> str:
        """What is missing; empty where it fits."""
        if self.fits:
            return ""
        if self.kv <= 0:
            return f"{-self.kv:.1f} GiB are missing before there is any KV cache"
        return f"one request of {self.length:,} tokens needs {self.least:.1f} GiB of KV cache, {self.kv:.1f} are left"

    @property
    def would_fit(self) -> str:
        """The advice in one line."""
        return "this would: " + ", or ".join(self.advice) if self.advice else "nothing on this host makes it fit"


def plan(spec: ModelSpec, device: Device, config: Mapping[str, Any], env: Mapping[str, str]) -> Plan:
    """The plan of a configuration on a device, with advice where it does not fit.

    Raises:
        PlanError: heads or experts do not divide, a wish cannot be met, too few or too old GPUs, numbers that vLLM
            refuses, or a CPU.
    """
    if device.memory_gib <= 0 or device.vendor == "cpu":
        raise PlanError(
            f"a CPU shares the host's memory: {on_cpu(spec, device, config, env):.0f} GiB of it are weights,"
            " VLLM_CPU_KVCACHE_SPACE sizes the KV cache, in GiB; --device plans for a GPU"
        )
    if why := choose.unserved(device):
        raise PlanError(why)
    if wrong := no_numbers(config):
        value = "auto" if config[wrong[0]] == -1 else config[wrong[0]]
        raise PlanError(f"{wrong[0]}: {value!r} is no number to plan with; name one: {bounds(wrong[0])}")
    if gpus(config) > device.count:
        raise PlanError(f"uses {gpus(config)} GPUs, {devices.label(device)} has {device.count}")
    found = _plan(spec, device, config, env)
    if found.fits:
        return replace(found, advice=(BELOW,)) if crowded(device, config) else found
    return replace(found, advice=tuple(_advice(spec, device, config, env, found)))


def on_cpu(spec: ModelSpec, device: Device, config: Mapping[str, Any], env: Mapping[str, str]) -> float:
    """GiB of the host's memory that a CPU's weights take.

    Raises:
        PlanError: a wish that cannot be met.
    """
    return memory.weights(deployment(spec, device, config, env), _experts(spec, device, config, env)).total


def _experts(spec: ModelSpec, device: Device, config: Mapping[str, Any], env: Mapping[str, str]) -> str:
    try:
        return choices(device, config, env, spec)["experts"].value
    except ValueError as error:  # ChoiceError and SettingsError
        raise PlanError(str(error)) from None


def _plan(spec: ModelSpec, device: Device, config: Mapping[str, Any], env: Mapping[str, str]) -> Plan:
    experts = _experts(spec, device, config, env)
    asked = deployment(spec, device, config, env)
    if experts == "upstream" and asked.moe_backend != "auto":
        experts = asked.moe_backend
    if why := defaults.refused(device, config):
        raise PlanError(why)
    filled = defaults.filled(device, config)
    tokens, requests, length = (int(filled[key]) for key in ("max-num-batched-tokens", "max-num-seqs", "max-model-len"))
    weights = memory.weights(asked, experts)
    total, utilization = device.memory_gib, float(config.get("gpu-memory-utilization", defaults.UTILIZATION))
    ranks = memory.OVERHEADS.ranks if gpus(config) > 1 else 0.0
    parts = [
        Part("weights", weights.total, CALCULATED if experts in ("gptoss", "triton", "marlin") else ESTIMATED),
        Part("activations and logits", memory.activations(spec, tokens, requests), ESTIMATED),
        Part("CUDA graphs", memory.OVERHEADS.graph * _graphs(config, requests), ESTIMATED),
        Part("CUDA, libraries, communication", memory.OVERHEADS.context + ranks, ESTIMATED),
    ]
    kv = total * utilization - sum(part.gib for part in parts)
    if "kv-cache-memory-bytes" in config:
        kv = int(config["kv-cache-memory-bytes"]) / memory.GIB
    cache = Cache.of(asked, int(filled["block-size"]))
    in_flight = tokens * (asked.pipeline_parallel + (filled["async-scheduling"] is True))
    at_once = cache.requests(max(kv, 0.0), length, in_flight)
    start = _measured(device, spec, experts, filled)
    peak = memory.load_peak(start, weights, spec.layers)
    return Plan(
        device,
        total,
        utilization,
        (*parts, Part("KV cache", max(kv, 0.0), ESTIMATED)),
        kv,
        Part("peak of loading", peak, MEASURED if start and start.load_peak_gib else ESTIMATED),
        cache.request_gib(length, in_flight),
        length,
        int(at_once * length),
        at_once,
        size(config, "data-parallel-size"),
        start,
    )


def _graphs(config: Mapping[str, Any], requests: int) -> int:
    compilation = config.get("compilation-config")
    compilation = compilation if isinstance(compilation, Mapping) else {}
    if config.get("enforce-eager") is True or compilation.get("cudagraph_mode") == "NONE":
        return 0
    if sizes := config.get("cudagraph-capture-sizes") or compilation.get("cudagraph_capture_sizes"):
        return len(sizes)
    return memory.captured(int(config.get("max-cudagraph-capture-size", min(2 * requests, 512))))


def _measured(device: Device, spec: ModelSpec, experts: str, filled: Mapping[str, Any]) -> Start | None:
    """The measured start that is nearest in its flags, of the same GPUs, model and experts."""
    tensor, row = size(filled, "tensor-parallel-size"), devices.of(device)
    tokens, requests = filled["max-num-batched-tokens"], filled["max-num-seqs"]
    same = [
        start
        for start in memory.MEASURED
        if row is not None
        and (start.device, start.count, start.experts) == (row.name, tensor, experts)
        and spec == SPECS[start.model]
        and not (start.layers or "speculative-config" in filled or gpus(filled) != tensor)
    ]
    return min(same, key=lambda start: (start.tokens != tokens, abs(start.requests - requests)), default=None)


CEILING: Final = 0.95
"""Utilisation that the usage guide advises for one full GPU; with several it ran out of memory there."""

BELOW: Final = f"stay below {CEILING}: there vLLM's usage guide ran out of memory on several 80 GB cards"


def crowded(device: Device, config: Mapping[str, Any]) -> bool:
    """Several H100 at a utilisation that ran out of memory there."""
    high = float(config.get("gpu-memory-utilization", 0)) >= CEILING
    return high and gpus(config) > 1 and device.arch == "sm90" and device.memory_gib < 100


def _advice(
    spec: ModelSpec, device: Device, config: Mapping[str, Any], env: Mapping[str, str], found: Plan
) -> Iterator[str]:
    """What makes it fit, each tried; nothing that would fail as well."""
    several = gpus(config) > 1
    high = 0.94 if several else CEILING
    offers: list[tuple[str, dict[str, Any]]] = []
    if found.utilization < high:
        offers.append((f"--gpu-memory-utilization {high}", {"gpu-memory-utilization": high}))
        few = {"gpu-memory-utilization": high, "max-num-batched-tokens": 1024}
        offers.append((f"--gpu-memory-utilization {high} --max-num-batched-tokens 1024", few))
    fewer = {"max-num-seqs": 16, "max-num-batched-tokens": 1024}
    offers.append(("--max-num-seqs 16 --max-num-batched-tokens 1024", fewer))
    all_three = {"gpu-memory-utilization": high, **fewer}
    offers.append((f"--gpu-memory-utilization {high} --max-num-seqs 16 --max-num-batched-tokens 1024", all_three))
    offers.append(("--kv-cache-dtype fp8, which is lossy", {"kv-cache-dtype": "fp8"}))
    offers += [(f"--max-model-len {length}", {"max-model-len": length}) for length in (65_536, 32_768, 16_384)]
    yield from _first_of_each(spec, device, config, env, offers)
    yield from _more_gpus(spec, device, config, env)


def _first_of_each(
    spec: ModelSpec,
    device: Device,
    config: Mapping[str, Any],
    env: Mapping[str, str],
    offers: list[tuple[str, dict[str, Any]]],
) -> Iterator[str]:
    """Offers that fit; of those that turn the same first flag, the gentlest."""
    seen = set()
    now = int(config.get("max-model-len", defaults.FIXED["max-model-len"]))
    for text, change in offers:
        flag = text.split()[0]
        shorter = change.get("max-model-len", 0) < now
        if flag not in seen and shorter and _fits(spec, device, {**config, **change}, env):
            seen.add(flag)
            yield text


def _more_gpus(spec: ModelSpec, device: Device, config: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[str]:
    for count in (2, 4, 8):
        if count <= size(config, "tensor-parallel-size"):
            continue
        more = device if device.count >= count else _as_many(device, count)
        if more is not None and _fits(spec, more, {**config, "tensor-parallel-size": count}, env):
            here = "" if device.count >= count else f", on {devices.label(more)}"
            yield f"--tensor-parallel-size {count}{here}"
            return


def _as_many(device: Device, count: int) -> Device | None:
    row = devices.of(device)
    return None if row is None or row.most < count else row.device(count)


def _fits(spec: ModelSpec, device: Device, config: Mapping[str, Any], env: Mapping[str, str]) -> bool:
    try:
        return _plan(spec, device, config, env).fits
    except PlanError:
        return False
