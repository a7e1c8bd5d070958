"""Memory of one GPU before a start: whether a configuration fits, for how many requests, and which settings would."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from vllm_gptoss.cli.recipes import defaults, memory
from vllm_gptoss.cli.recipes.deployment import bounds, choices, deployment, gpus, no_numbers, section, size
from vllm_gptoss.cli.recipes.memory import Cache, Start
from vllm_gptoss.cli.recipes.schema import SPECS
from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import devices
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.spec import GPT_OSS_20B, ModelSpec

MEASURED = "measured"
ESTIMATED = "estimated"
CALCULATED = "calculated"


class PlanError(ValueError):
    """A configuration that cannot be planned; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Part:
    """GiB of one GPU, and how it is known."""

    name: str
    gib: float
    known: str


@dataclass(frozen=True)
class Plan:
    """Memory of one of `gpus` GPUs. parts add up to `budget`, the share of `total` that vLLM may take.

    length: of the longest request; requests: of that length, concurrently, on each replica; least: GiB of one of them.
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


def plan(
    spec: ModelSpec, device: Device, config: Mapping[str, Any], env: Mapping[str, str], advise: bool = True
) -> Plan:
    """The plan of a configuration on a device, with advice where it does not fit.

    Raises:
        PlanError: heads or experts do not divide, an explicit request cannot be met, too few or too old GPUs, numbers
        that vLLM refuses, or a CPU.
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
        return replace(found, advice=tuple(filter(None, [caution(device, config)])))
    return replace(found, advice=tuple(_advice(spec, device, config, env))) if advise else found


def on_cpu(spec: ModelSpec, device: Device, config: Mapping[str, Any], env: Mapping[str, str]) -> float:
    """GiB of the host's memory that a CPU's weights take.

    Raises:
        PlanError: an explicit request cannot be met.
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
        cache.blocks_of_request(length, in_flight) * cache.block_bytes / memory.GIB,
        length,
        int(at_once * length),
        at_once,
        size(config, "data-parallel-size"),
        start,
    )


def _graphs(config: Mapping[str, Any], requests: int) -> int:
    compilation = section(config, "compilation-config")
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
SHARED: Final = 0.85
"""Of a DGX Spark, by github.com/vllm-project/recipes/pull/632: its host runs out of memory at vLLM's default."""


def caution(device: Device, config: Mapping[str, Any]) -> str:
    """What to set where a utilisation is known to run out of memory: several H100, and a DGX Spark. Empty elsewhere."""
    used = float(config.get("gpu-memory-utilization", defaults.UTILIZATION))
    if used >= CEILING and gpus(config) > 1 and _crowds(device):
        return f"stay below {CEILING}: there vLLM's usage guide ran out of memory on several 80 GB cards"
    if used > SHARED and device.arch == "sm121":
        return f"--gpu-memory-utilization {SHARED}, because the host shares this memory"
    return ""


def _crowds(device: Device) -> bool:
    return device.arch == "sm90" and device.memory_gib < 100


def fits(spec: ModelSpec, device: Device, config: Mapping[str, Any], env: Mapping[str, str]) -> bool:
    """Whether a configuration fits the memory of a GPU, or of a CPU's host where that is known."""
    try:
        if device.vendor == "cpu":
            return not device.memory_gib or on_cpu(spec, device, config, env) <= device.memory_gib
        return _plan(spec, device, config, env).fits
    except PlanError:
        return False


Change = Mapping[str, Any]

LENGTHS: Final = (131_072, 65_536, 32_768, 16_384, 8192, 4096)


def _changes(device: Device, config: Mapping[str, Any], users: int) -> list[tuple[int, Change]]:
    """Combinations of settings that lower the memory needed, each with its cost; the cheapest first.

    users: requests that must run concurrently. The cost is the number of settings; an fp8 cache, which is lossy, is 3.
    """
    now, high = defaults.filled(device, config), 0.94 if _crowds(device) and device.count > 1 else CEILING
    high = SHARED if device.arch == "sm121" else high
    tensor = size(config, "tensor-parallel-size")
    seqs = dict.fromkeys(max(each, users) for each in (16, 4))
    few = [{"max-num-batched-tokens": 1024}] if now["max-num-batched-tokens"] > 1024 else []
    axes: list[list[Change]] = [
        [{}, {"kv-cache-dtype": "fp8"}],
        [{}, *({"max-model-len": each} for each in LENGTHS if each < now["max-model-len"])],
        [{}, *({"tensor-parallel-size": each} for each in (2, 4, 8) if tensor < each <= device.count)],
        [{}, {"gpu-memory-utilization": high}] if float(config.get("gpu-memory-utilization", 0)) < high else [{}],
        [{}, *few, *({"max-num-seqs": each, "max-num-batched-tokens": max(1024, each)} for each in seqs)],
    ]
    costs = {at: sum(map(bool, at)) + 2 * at[0] for at in itertools.product(*(range(len(axis)) for axis in axes))}
    order = sorted(costs, key=lambda at: (costs[at], at))
    return [
        (costs[at], {k: v for axis, index in zip(axes, at, strict=True) for k, v in axis[index].items()})
        for at in order
    ]


def _advice(spec: ModelSpec, device: Device, config: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[str]:
    """The cheapest combinations that fit, the smallest value of each, and more GPUs."""
    found: dict[frozenset[str], int] = {}
    for cost, change in _changes(device, config, 1):
        if cost > min(found.values(), default=cost):
            break
        if change and frozenset(change) not in found and fits(spec, device, {**config, **change}, env):
            found[frozenset(change)] = cost
            flags = " ".join(f"--{key} {value}" for key, value in change.items())
            yield f"{flags}, which is lossy" if "kv-cache-dtype" in change else flags
    row = devices.of(device)
    for count in (2, 4, 8):
        more = row.device(count) if row is not None and device.count < count <= row.most else None
        if more is not None and fits(spec, more, {**config, "tensor-parallel-size": count}, env):
            yield f"--tensor-parallel-size {count}, on {devices.label(more)}"
            return
    if not found:
        yield instead(spec, device, env)


def instead(spec: ModelSpec, device: Device, env: Mapping[str, str]) -> str:
    """What serves gpt-oss where no settings make a model fit."""
    smaller = spec != GPT_OSS_20B and search(GPT_OSS_20B, device, {"max-model-len": LENGTHS[-1]}, env, 1)
    return f"more or larger GPUs{', gpt-oss-20b' if smaller else ''}, or llama.cpp with experts in the host's memory"


def search(
    spec: ModelSpec, device: Device, config: Mapping[str, Any], env: Mapping[str, str], users: int
) -> tuple[dict[str, Any], Plan] | None:
    """The configuration that serves `users` requests of full length concurrently with the fewest changes.

    If there is none: the one that comes nearest, in requests times length. None: nothing fits.
    """
    best, most = None, 0.0
    if device.arch == "sm121":
        config = {"gpu-memory-utilization": SHARED, **config}
    wanted = int(defaults.filled(device, config)["max-model-len"])
    for _, change in _changes(device, config, users):
        changed = {**config, **change}
        try:
            found = plan(spec, device, changed, env, advise=False)
        except PlanError:
            continue
        reached = min(1.0, found.requests * found.replicas / users) * found.length / wanted
        if found.fits and reached > most * 1.001:
            best, most = (changed, found), reached
        if most >= 1:
            break
    return best
