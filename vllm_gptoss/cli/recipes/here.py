"""The accelerators of this machine, without torch where the driver's tool lists them."""

from __future__ import annotations

import csv
import functools
import os
import subprocess
from pathlib import Path

from vllm_gptoss.engine.choose import device
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.choose.devices import DeviceError

AMD = Path("/dev/kfd")
"""The driver of an AMD GPU."""
QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]


@functools.cache
def detect() -> Device:
    """As `engine.choose.device.detect`, which imports torch; here only for AMD, and where NVIDIA's tool fails.

    Raises:
        DeviceError: there are GPUs, and torch, which reads them, is missing.
    """
    if not Path("/dev/nvidiactl").exists() and not AMD.exists():
        return device.without_gpu()
    try:
        return _by_driver() or device.detect()
    except ImportError:
        raise DeviceError(
            "torch is not installed, so the GPUs here are unknown: name them, as --device 2xH100"
        ) from None


def _by_driver() -> Device | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = QUERY if visible is None else [*QUERY, f"--id={visible}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if len(row) == 3]
    if done.returncode or not rows or not rows[0][1].isdigit():
        return None
    name, memory, capability = rows[0]
    return Device("nvidia", name, f"sm{capability.replace('.', '')}", int(memory) / 1024, len(rows))
