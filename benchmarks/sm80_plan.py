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
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from vllm_gptoss.engine import spec
from vllm_gptoss.engine.kernels import attention_many, experts, experts_plan, norm_rope_router, nvrtc
from vllm_gptoss.engine.kernels.attention_many import ManyPlan
from vllm_gptoss.engine.kernels.experts_plan import DOWN, DOWN_FEWEST, FEWEST_TOKENS, NARROW_TOKENS, UP, Tuning

KIB = 1024
LIMITS = {"sm_80": 163 * KIB, "sm_86": 99 * KIB, "sm_89": 99 * KIB, "sm_120": 99 * KIB, "sm_121": 99 * KIB}
"""Shared memory that a block may have: A100; 3090 and A10; 4090 and L40S; 5090 and RTX PRO 6000; Spark."""
MULTIPROCESSOR = {99 * KIB: 100 * KIB, 163 * KIB: 164 * KIB}
"""Shared memory of a multiprocessor by that of a block. Each block costs 1 KiB of it besides its own."""
REGISTERS = 65_536
"""Of a multiprocessor."""
MOST_ROWS = experts_plan.WIDE_ROWS


@dataclass(frozen=True)
class ExpertsPlan:
    """One kernel of experts.cu for up to `most` tokens. slot: tokens of a wide kernel's slots; rows: activation rows
    that a block stages; shared: bytes of a block."""

    which: str
    tuning: Tuning
    most: int
    slot: int
    rows: int
    shared: int

    def macros(self, model: spec.ModelSpec, mode: tuple[int, int] = (0, 0)) -> dict[str, int | str]:
        columns, rows = (
            (model.hidden, 2 * model.intermediate) if self.which == "experts_up" else (model.intermediate, model.hidden)
        )
        pairs = -(-columns // 128) * 2
        sizes = (rows, columns // 64, pairs, model.experts, model.active_experts, model.experts)
        values = experts_plan.defines(self.tuning, *sizes, mode, False, self.most)
        return {**values, "ONLY": experts.ONLY[self.which], "WIDE_SLOT": self.slot}


def shapes_of(which: str, tokens: int) -> Iterator[tuple[Tuning, int, int]]:
    """(tuning, tokens compiled for, slot) from the best to the least. A ring of 5 tiles divides K = 45 tiles."""
    base = replace(UP if which == "experts_up" else DOWN, registers=128)
    short = replace(base, depth=5, chunk=1)
    if tokens <= FEWEST_TOKENS and which == "experts_down":
        yield replace(DOWN_FEWEST, registers=128), NARROW_TOKENS, 16
    if tokens <= NARROW_TOKENS:
        yield base, NARROW_TOKENS, 16
        yield short, NARROW_TOKENS, 16
    for slot in (16, 8):
        yield base, experts_plan.WIDE_TOKENS, slot
        yield short, experts_plan.WIDE_TOKENS, slot


def experts_plan_for(which: str, tokens: int, limit: int, model: spec.ModelSpec = spec.GPT_OSS_20B) -> ExpertsPlan:
    """The first of `shapes_of` whose block fits `limit` bytes.

    Raises:
        ValueError: none does.
    """
    tiles = (model.hidden if which == "experts_up" else model.intermediate) // 64
    for tuning, most, slot in shapes_of(which, tokens):
        if most == NARROW_TOKENS:
            rows, _ = experts_plan.staged_rows(which, tokens)
            shared = experts_plan.shared_bytes(tuning, tiles, rows, model.active_experts)
        else:
            fixed = experts_plan.shared_bytes(tuning, tiles, 0, model.active_experts, model.experts, most, slot)
            rows = min(MOST_ROWS, (limit - fixed) // (tiles * 128 + 16))
            shared = fixed + rows * (tiles * 128 + 16)
            if rows < slot:
                continue
        if shared <= limit:
            return ExpertsPlan(which, tuning, most, slot, rows, shared)
    raise ValueError(f"{which} of {tokens} tokens needs more than {limit} bytes of shared memory")


def attention_plan(tokens: int, window: int, limit: int) -> ManyPlan:
    """`attention_many.plan` with as many blocks on a multiprocessor as its shared memory holds."""
    wanted = attention_many.plan(tokens, window)
    fit = MULTIPROCESSOR[limit] // (wanted.shared_bytes + KIB + 256)
    return replace(wanted, blocks=min(wanted.blocks, fit))


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
    for which in experts.ONLY:
        for tokens in (1, 8, 16, 64):
            made = experts_plan_for(which, tokens, limit)
            name = f"{which}, {tokens} token{'s' * (tokens > 1)}"
            yield name, experts.SOURCE, made.macros(model), made.shared, made.tuning.warps * 32
    for name, window, tokens in (("full", 0, 1), ("window, to 64 tokens", 128, 64), ("window, from 65 on", 128, 65)):
        plan = attention_plan(tokens, window, limit)
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
