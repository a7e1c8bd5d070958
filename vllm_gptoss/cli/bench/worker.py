"""Processes with an engine of one variant: the plugin with its settings, or stock vLLM with named experts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

PLUGIN = "plugin"


def is_plugin(variant: str) -> bool:
    """Whether a variant's name means this package."""
    return variant.partition(":")[0] == PLUGIN


def settings(variant: str) -> dict[str, str]:
    """The plugin settings in a variant's name: `plugin:layers=upstream;experts=triton`."""
    own = variant.partition(":")[2]
    return dict(pair.split("=", 1) for pair in own.split(";")) if own else {}


def variant_options(variant: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that choose a variant: our settings, or vLLM's experts."""
    if not is_plugin(variant):
        return {"moe_backend": variant}
    own = settings(variant)
    return {"additional_config": {"gptoss": own}} if own else {}


def environment(variant: str) -> dict[str, str]:
    """What a process with an engine of this variant needs set; the variables of the caller win where they may."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **os.environ,
        # a name that no plugin has: stock vLLM must be stock
        "VLLM_PLUGINS": "gptoss" if is_plugin(variant) else "none",
    }


def in_process(module: str, job: dict[str, Any]) -> Any:
    """The result of `module` for a job of `variant`, in a new process: the module's `__main__` calls `answer`.

    Raises:
        typer.BadParameter: the process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.json").write_text(json.dumps(job))
        variables = environment(job["variant"]) | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        command = [sys.executable, "-m", module, folder]
        done = subprocess.run(command, env=variables, stdout=sys.stderr, check=False)
        if done.returncode:
            raise typer.BadParameter(f"{job['variant']}: the engine ended with {done.returncode}")
        return json.loads((Path(folder) / "result.json").read_text())


def answer(run: Callable[[dict[str, Any]], Any]) -> None:
    """Writes what `run` returns for the job of `in_process`."""
    folder = Path(sys.argv[1])
    (folder / "result.json").write_text(json.dumps(run(json.loads((folder / "job.json").read_text()))))


def free_port() -> int:
    """A TCP port of the loopback interface that was free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
