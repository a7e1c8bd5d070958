"""Capabilities of this machine, checked once; each value is None or the reason why not."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from demo.server import on_gpu

SAME_EVERYWHERE = {} if on_gpu() else {"GPTOSS_EXPERTS": "dequantize"}
"""Experts of the shared servers. A CPU with AMX has another kernel by default, which rounds differently: text that the
model has not memorised then differs. That kernel has separate tests."""

OWN_NAMESPACES = """
from vllm_gptoss.tools.sandbox import linux
linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET)
linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
"""


@cache
def without_namespaces() -> str | None:
    """Why no user may make namespaces here: the kernel's setting, or a container's filter."""
    done = subprocess.run([sys.executable, "-c", OWN_NAMESPACES], capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        return None
    return f"user namespaces with mounts are not available here: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
