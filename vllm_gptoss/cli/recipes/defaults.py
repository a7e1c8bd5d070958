"""vLLM's defaults of flags for gpt-oss; some depend on the GPU.

Sources: vLLM 0.32.0 and 0.33.0, `engine/arg_utils.py` (`get_batch_defaults`), `config/cache.py`, `config/vllm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm_gptoss.engine.choose import devices
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.spec import MAX_POSITIONS

UTILIZATION: Final = 0.92

FIXED: Final[Mapping[str, Any]] = {
    "async-scheduling": True,
    "block-size": 16,
    "dtype": "bfloat16",
    "enable-chunked-prefill": True,
    "enable-prefix-caching": True,
    "max-model-len": MAX_POSITIONS,
    "quantization": "mxfp4",
}
"""Defaults that are None in the parser, and set by vLLM later; `probe` reads those of the parser."""


def batch(device: Device) -> tuple[int, int]:
    """`max-num-batched-tokens` and `max-num-seqs` of a server on this device."""
    if device.vendor == "cpu":
        return 2048, 128
    if device.memory_gib >= 160:
        return 16_384, 1024
    row = devices.of(device)
    if device.memory_gib >= 70 and not (row is not None and row.name == "A100"):
        return 8192, 1024
    return 2048, 256


def of(device: Device) -> dict[str, Any]:
    """Every default that the parser does not have, by its flag."""
    tokens, requests = batch(device)
    return {**FIXED, "max-num-batched-tokens": tokens, "max-num-seqs": requests}


def filled(device: Device, config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the defaults; that of requests is at most the batched tokens."""
    found = {**of(device), **config}
    if "max-num-seqs" not in config:
        found["max-num-seqs"] = min(found["max-num-seqs"], found["max-num-batched-tokens"])
    return found


def refused(device: Device, config: Mapping[str, Any]) -> str:
    """Why vLLM refuses numbers that are valid separately; empty where it accepts them."""
    found = filled(device, config)
    tokens, requests = found["max-num-batched-tokens"], found["max-num-seqs"]
    if tokens >= requests:
        return ""
    return f"--max-num-batched-tokens {tokens} is refused at the start: --max-num-seqs {requests} may not be more"
