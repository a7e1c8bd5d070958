"""Adds a gather of uneven parts, which vLLM 0.32's CPU platform lacks for data parallelism of experts.

Tests run two engines on one machine with it. It enters by vLLM's own door, a platform plugin, in the environment of
the tested servers alone.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.places import ROOT

NAME = "gptoss_many_cpus"


def platform() -> str:
    """vLLM's entry point for platforms."""
    return "tests.support.many_cpus_platform.Platform"


def environment(folder: Path) -> dict[str, str]:
    """Variables that make a server use it. folder: where its entry point is written."""
    info = folder / f"{NAME}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.platform_plugins]\n{NAME} = tests.support.many_cpus:platform\n")
    return {"PYTHONPATH": f"{folder}:{ROOT}"}
