"""How the kernels that need no more than sm_80 fit GPUs before and after Hopper, and what the compiler makes of them.

    python benchmarks/sm80_plan.py [--out FILE]

Needs no GPU. Of each architecture: registers of a thread, spilled bytes and shared memory of a block, for the shapes of
the 20b, by NVRTC's ptxas. The kernels have run on none of these GPUs; `sm80_experts.py` and `sm80_attention.py`
run two of them as PTX on Hopper.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import functools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from vllm_gptoss.engine import spec
from vllm_gptoss.engine.kernels import attention_many, experts, experts_marlin, norm_rope_router, nvrtc
from vllm_gptoss.engine.kernels.experts_marlin import MarlinFewExperts, MarlinProjection
from vllm_gptoss.engine.kernels.experts_plan import Tuning

KIB = 1024
LIMITS = {"sm_80": 163 * KIB, "sm_86": 99 * KIB, "sm_89": 99 * KIB, "sm_120": 99 * KIB, "sm_121": 99 * KIB}
"""Shared memory that a block may have: A100; 3090 and A10; 4090 and L40S; 5090 and RTX PRO 6000; Spark."""
MULTIPROCESSOR = {99 * KIB: 100 * KIB, 163 * KIB: 164 * KIB}
"""Shared memory of a multiprocessor by that of a block. Each block costs 1 KiB of it besides its own."""
REGISTERS = 65_536
"""Of a multiprocessor."""
FEWEST_BLOCKS = 48
"""Multiprocessors of the smallest GPU, Spark's."""


TRIED = tuple(
    Tuning(warps, share, 4, depth, 1)
    for warps, share, depth in (
        (15, 15, 3), (15, 15, 2), (15, 15, 6), (16, 16, 3), (16, 8, 3), (12, 12, 2), (12, 12, 4), (10, 10, 3),
        (9, 9, 2), (9, 9, 5), (8, 8, 3), (8, 8, 4),
    )
)  # fmt: skip
"""Tunings of a block that `sm80_experts.py` compares."""


def padded(model: spec.ModelSpec) -> tuple[int, int]:
    """Hidden and intermediate size as vLLM pads them for Marlin."""
    return -(-model.hidden // 256) * 256, -(-model.intermediate // 128) * 128


def experts_without_weights(
    limit: int, model: spec.ModelSpec = spec.GPT_OSS_20B, blocks: int = FEWEST_BLOCKS
) -> MarlinFewExperts:
    """A layer's experts on the meta device: plans and macros."""
    hidden, intermediate = padded(model)

    def projection(rows: int, columns: int, stored: int, width: int) -> MarlinProjection:
        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(model.experts, *shape, dtype=dtype, device="meta")

        values = empty(width // 16, stored * 2, dtype=torch.int32)
        scales, bias = empty(width // 32, stored, dtype=torch.uint8), empty(stored, dtype=torch.bfloat16)
        return MarlinProjection(values, scales, bias, rows, columns)

    up = projection(2 * model.intermediate, model.hidden, 2 * intermediate, hidden)
    down = projection(model.hidden, model.intermediate, hidden, intermediate)
    return MarlinFewExperts(
        up,
        down,
        model.active_experts,
        alpha=1,
        limit=1,
        expert_map=None,
        arch="compute_80",
        shared=limit,
        blocks=blocks,
    )


@dataclass(frozen=True)
class Compiled:
    kernel: str
    arch: str
    registers: int
    spilled: int
    shared: int
    threads: int
    limit: int


@functools.cache
def ptxas(source: str, arch: str, macros: tuple[tuple[str, int | str], ...]) -> tuple[int, int, int]:
    """(registers, bytes of spill stores, bytes of static shared memory) of the one kernel of a source."""
    library, program = nvrtc.library(), ctypes.c_void_p()
    options = [f"--gpu-architecture={arch}", "--std=c++17", "--use_fast_math", "--ptxas-options=-v"]
    options += [f"-D{name}={value}" for name, value in macros]
    array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    if library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None):
        raise nvrtc.NvrtcError("nvrtcCreateProgram failed")
    try:
        status, size = library.nvrtcCompileProgram(program, len(options), array), ctypes.c_size_t()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        said = log.value.decode()
        if status:
            raise nvrtc.NvrtcError(said)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    found = [
        re.search(wanted, said)
        for wanted in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes smem")
    ]
    registers, spilled, shared = (int(match[1]) if match else 0 for match in found)
    return registers, spilled, shared


def kernels(arch: str) -> Iterator[tuple[str, Path, dict[str, int | str], int, int]]:
    """(name, source, macros, dynamic shared memory, threads) of each kernel of a 20b step on an architecture."""
    limit, model = LIMITS[arch], spec.GPT_OSS_20B
    layer = experts_without_weights(limit)
    for which in experts.ONLY:
        for tokens in (1, 8, 16, 64):
            made = layer.plan(which, tokens)
            name = f"{which}, {tokens} token{'s' * (tokens > 1)}"
            yield name, experts_marlin.SOURCE, layer.macros(made, torch.int32), made.shared, made.tiling.warps * 32
    for name, window, tokens in (("full", 0, 1), ("window, to 64 tokens", 128, 64), ("window, from 65 on", 128, 65)):
        plan = attention_many.plan(tokens, window, arch=arch)
        name = f"attention_many, {name}"
        yield name, attention_many.SOURCE, plan.macros, plan.shared_bytes, plan.warps * 32
    cuda, columns = norm_rope_router.CUDA, model.hidden
    yield "norm_many", cuda / "norm_many.cu", {"COLUMNS": columns}, 0, -(-columns // 256) * 32
    yield "rope_many", cuda / "rope_many.cu", {"CACHE": "Bf16"}, 0, 320


def compiled(arch: str) -> Iterator[Compiled]:
    """What ptxas makes of each of `kernels`."""
    for name, path, macros, dynamic, threads in kernels(arch):
        registers, spilled, static = ptxas(nvrtc.source(path), arch, tuple(macros.items()))
        yield Compiled(name, arch, registers, spilled, dynamic + static, threads, LIMITS[arch])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    rows = [vars(each) for arch in LIMITS for each in compiled(arch)]
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    if options.out:
        about = {"nvrtc": ".".join(map(str, nvrtc.version())), "date": datetime.date.today().isoformat()}
        command = " ".join(["python benchmarks/sm80_plan.py", *sys.argv[1:]])
        Path(options.out).write_text(json.dumps({**about, "command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
