"""How much of the GPU was in use over time, as `nvidia-smi` sees it: a peak that torch has forgotten is still there."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

INTERVAL_MS = 50


@contextlib.contextmanager
def sampled() -> Iterator[list[float]]:
    """Samples the first visible GPU while the block runs; the list is filled when it ends. Empty without nvidia-smi."""
    samples: list[float] = []
    if (tool := shutil.which("nvidia-smi")) is None:
        yield samples
        return
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    command = [tool, "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"-lms={INTERVAL_MS}"]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        try:
            yield samples
        finally:
            process.terminate()
            process.wait()
            out.seek(0)
            samples += [int(line) / 1024 for line in out.read().split() if line.isdigit()]


def load_peak(samples: Sequence[float], kv: float) -> float | None:
    """The most in use before vLLM took `kv` GiB for the KV cache, in GiB; None where that moment is unknown. vLLM
    allocates the cache at once: the moment is the last rise above the maximum less half the cache.
    """
    if not samples or kv <= 0:
        return None
    level = max(samples) - kv / 2
    rises = [at for at in range(1, len(samples)) if samples[at - 1] < level <= samples[at]]
    return max(samples[: rises[-1]]) if rises else None
