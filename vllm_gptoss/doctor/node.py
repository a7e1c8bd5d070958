"""Run by `doctor --ray` on every node, in a fresh interpreter of that node: what it is, as one JSON line."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import sys
from typing import Any

from vllm_gptoss.doctor.findings import driver_cuda, examine

DECIDED = ("attention", "layers", "experts", "KV cache")
"""Findings that are a `Choice`."""


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):  # vLLM prints while it loads; only our line may reach stdout
        answer = facts()
    print(json.dumps(answer))


def facts() -> dict[str, Any]:
    """`versions` and `choices` by name, `device`, `driver`, and `findings` as doctor has them on one machine."""
    from vllm_gptoss.device import detect

    found = examine()
    device = detect()
    return {
        "versions": {name: version(name) for name in ("vllm-gptoss", "vllm", "torch")},
        "device": str(device),
        "accelerators": 0 if device.vendor == "cpu" else device.count,
        "driver": driver_cuda() or "none",
        "choices": {each.check: each.detail for each in found if each.check in DECIDED},
        "findings": [dataclasses.asdict(each) for each in found],
    }


def version(distribution: str) -> str:
    """What is installed here, whatever vLLM's distribution is called."""
    from vllm_gptoss import _vllm

    if distribution == "vllm":
        return _vllm.version() or "not installed"
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
