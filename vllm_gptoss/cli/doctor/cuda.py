"""CUDA versions of the driver and of a toolkit."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path


def driver_cuda() -> str | None:
    """The CUDA version that the driver speaks, as `13.0`; None without a driver."""
    try:
        found = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found)):
            return None
    except OSError:
        return None
    return f"{found.value // 1000}.{found.value % 1000 // 10}"


def nvcc(home: Path) -> str | None:
    """The version of a toolkit's compiler; None without one."""
    try:
        text = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    _, _, rest = text.partition("release ")
    return rest.split(",")[0] or None


def number(version: str) -> tuple[int, ...]:
    """`13.0` as (13, 0)."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())
