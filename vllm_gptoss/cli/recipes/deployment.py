"""A configuration as the facts that `choose` reads, without vLLM: `engine/choose/vllm_config.py` does the same from a
running one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import Choice, Deployment
from vllm_gptoss.engine.choose import vllm_config as describe
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.spec import ModelSpec
from vllm_gptoss.settings import Settings


def deployment(spec: ModelSpec, device: Device, config: Mapping[str, Any], env: Mapping[str, str]) -> Deployment:
    """config: keys of `vllm serve --config`."""
    compilation = section(config, "compilation-config")
    return Deployment(
        model=spec,
        device_type="cpu" if device.vendor == "cpu" else "cuda",
        tensor_parallel=size(config, "tensor-parallel-size"),
        pipeline_parallel=size(config, "pipeline-parallel-size"),
        data_parallel=size(config, "data-parallel-size"),
        decode_context_parallel=size(config, "decode-context-parallel-size"),
        prefill_context_parallel=size(config, "prefill-context-parallel-size"),
        expert_parallel=config.get("enable-expert-parallel") is True,
        micro_batches=config.get("enable-dbo") is True,
        kv_cache_dtype=str(config.get("kv-cache-dtype", "auto")),
        kv_connectors=describe.connectors(section(config, "kv-transfer-config")),
        lora=config.get("enable-lora") is True,
        drafts=section(config, "speculative-config").get("method"),
        piecewise_graphs=compilation.get("cudagraph_mode") == "PIECEWISE",
        graphs=config.get("enforce-eager") is not True,
        offloaded=any(config.get(key) for key in ("cpu-offload-gb", "offload-group-size")),
        moves_experts=any(config.get(key) is True for key in ("enable-eplb", "enable-elastic-ep")),
        load_format=str(config.get("load-format", "auto")),
        aiter=describe.uses_aiter(env),
        attention_backend=config.get("attention-backend"),
        moe_backend=str(config.get("moe-backend", "auto")),
    )


NUMBERS: Final[Mapping[str, type[int] | type[float]]] = {
    "tensor-parallel-size": int,
    "pipeline-parallel-size": int,
    "data-parallel-size": int,
    "decode-context-parallel-size": int,
    "prefill-context-parallel-size": int,
    "max-num-batched-tokens": int,
    "max-num-seqs": int,
    "max-model-len": int,
    "max-cudagraph-capture-size": int,
    "block-size": int,
    "kv-cache-memory-bytes": int,
    "gpu-memory-utilization": float,
}
"""Keys that the tables and the plan calculate with. A float is a share."""


def no_numbers(config: Mapping[str, Any]) -> list[str]:
    """Keys of `NUMBERS` with a value of zero or less, or a share above 1; -1 is `auto` of `max-model-len`."""
    found = []
    for key, kind in NUMBERS.items():
        value: Any = config.get(key, 1)
        most = 1 if kind is float else math.inf
        if isinstance(value, bool) or not isinstance(value, int | kind) or not 0 < value <= most:
            found.append(key)
    return found


def bounds(key: str) -> str:
    """What values a key of `NUMBERS` takes, in words."""
    return "above 0 and at most 1" if NUMBERS[key] is float else "1 or more"


def size(config: Mapping[str, Any], key: str) -> int:
    """A parallel size; 1 where none is given."""
    return int(config.get(key, 1))


def gpus(config: Mapping[str, Any]) -> int:
    """Devices that a configuration uses."""
    keys = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "prefill-context-parallel-size")
    return math.prod(size(config, key) for key in keys)


def choices(
    device: Device, config: Mapping[str, Any], env: Mapping[str, str], spec: ModelSpec
) -> dict[str, Choice[str]]:
    """The tables' choices: attention, experts, layers.

    Raises:
        ChoiceError: an explicit request that cannot be met, or heads or experts that do not divide. SettingsError: an
        unknown setting of the plugin.
    """
    settings = Settings.load(section(config, "additional-config"), env)
    asked = deployment(spec, device, config, env)
    if asked.kv_cache_dtype != "auto":
        choose.kv_cache_dtype(device, asked.kv_cache_dtype)
    return {
        "attention": choose.attention(device, asked),
        "experts": choose.experts(device, asked, settings.experts),
        "layers": choose.layers(device, asked, settings.layers),
    }


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object of a configuration; empty where it has none."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}
