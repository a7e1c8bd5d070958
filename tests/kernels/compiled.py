"""Every Triton kernel to machine code for one GPU, without one: `python -m tests.kernels.compiled BACKEND ARCH WARP`.

Prints kernel and size of what a driver would load. Shapes are the 20b's.
"""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_gptoss.kernels.experts_triton import KERNELS

SHAPES = {"ACTIVE": 4, "C": 2880, "N": 2880, "PAIRS": 32, "TOKENS": 16, "BN": 32, "BK": 64}
TYPES = {
    "x": "*bf16", "act": "*bf16", "out": "*bf16", "ids": "*i32", "weights": "*fp32", "blocks": "*u8", "scales": "*u8",
    "bias": "*bf16", "parts": "*fp32", "pairs": "i32", "alpha": "fp32", "limit": "fp32",
}  # fmt: skip


def main(backend: str, arch: str, warp: int) -> None:
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, warp)
    for name, kernel in KERNELS.items():
        signature = {argument: TYPES.get(argument, "constexpr") for argument in kernel.arg_names}
        constants = {argument: SHAPES[argument] for argument in kernel.arg_names if argument in SHAPES}
        made = triton.compile(ASTSource(kernel, signature, constants), target=target)
        print(name, len(made.asm["cubin" if backend == "cuda" else "hsaco"]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
