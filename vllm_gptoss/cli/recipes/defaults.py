"""What vLLM fills in where a flag is left out, for gpt-oss: some of it depends on the GPU.

Sources: vLLM 0.32.0 and 0.33.0, `engine/arg_utils.py` (`get_batch_defaults`), `config/cache.py`, `config/vllm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm_gptoss.engine.choose import devices
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.spec import MAX_POSITIONS

UTILIZATION: Final = 0.92
BLOCK_SIZE: Final = 16

FIXED: Final[Mapping[str, Any]] = {
    "async-scheduling": True,
    "block-size": BLOCK_SIZE,
    "dtype": "bfloat16",
    "enable-chunked-prefill": True,
    "enable-prefix-caching": True,
    "max-model-len": MAX_POSITIONS,
    "quantization": "mxfp4",
}
"""What the parser calls None and vLLM works out later; the parser's own defaults are asked of it."""


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
    """Every default that is worked out, by its flag."""
    tokens, requests = batch(device)
    return {**FIXED, "max-num-batched-tokens": tokens, "max-num-seqs": requests}


def filled(device: Device, config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with them; requests that nobody asked for are no more than batched tokens."""
    found = {**of(device), **config}
    if "max-num-seqs" not in config:
        found["max-num-seqs"] = min(found["max-num-seqs"], found["max-num-batched-tokens"])
    return found


def refused(device: Device, config: Mapping[str, Any]) -> str:
    """Why vLLM refuses numbers that are right one by one; empty where it does not."""
    found = filled(device, config)
    tokens, requests = found["max-num-batched-tokens"], found["max-num-seqs"]
    if tokens >= requests:
        return ""
    return f"--max-num-batched-tokens {tokens} is refused at the start: --max-num-seqs {requests} may not be more"
