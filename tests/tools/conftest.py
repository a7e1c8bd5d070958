"""The portable tier's interpreter as machine code, compiled once for all tests."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.places import CACHE, ROOT
from tests.support.scale import SOAK
from vllm_gptoss.tools.sandbox import interpreter

COMPILE = """
import sys, wasmtime
from vllm_gptoss.tools.sandbox import wasm

def quick(config):
    for flag in ((b"opt_level", b"none"), (b"regalloc_algorithm", b"single_pass")):
        wasmtime._bindings.wasmtime_config_cranelift_flag_set(config.ptr(), *flag)
    return engine(config)

engine, wasmtime.Engine = wasmtime.Engine, quick
wasm.main(["compile", sys.argv[1]])
"""


async def compile_quickly(source: Path, target: Path) -> None:
    """Without optimisation, in half of the time; wasmtime loads either. `make soak` compiles as users do."""
    settings = json.dumps({"source": str(source), "target": str(target)})
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", COMPILE, settings, cwd=ROOT)
    assert await process.wait() == 0


@pytest.fixture(scope="module")
def interpreter_cache() -> Iterator[Path]:
    """The interpreter's folder in the cache of tests, which `GPTOSS_CACHE` names meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPTOSS_CACHE", str(CACHE))
        if not SOAK:
            patch.setattr(interpreter, "_compile", compile_quickly)
        yield asyncio.run(interpreter.Runtime.prepare()).module.parent
