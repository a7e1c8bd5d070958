"""The portable expert kernels: arithmetic in Triton's interpreter, and that every architecture compiles them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

RUN = """
import torch
from vllm_gptoss.kernels import experts_triton, mxfp4

def make(experts, rows, columns, seed):
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, generator=g)
    scales = torch.randint(118, 126, (experts, rows, columns // 32), dtype=torch.uint8, generator=g)
    return blocks, scales, torch.randn(experts, rows, generator=g).bfloat16()

def reference(x, ids, weights, up, down):
    out = torch.zeros(x.shape[0], down[0].shape[1], dtype=torch.float64)
    for t in range(x.shape[0]):
        for a in range(ids.shape[1]):
            e = int(ids[t, a])
            if e < 0:
                continue
            h = mxfp4.dequantize(up[0][e], up[1][e], torch.float64) @ x[t].double() + up[2][e].double()
            gate, linear = h[::2].clamp(max=7.0), h[1::2].clamp(-7.0, 7.0)
            h = (gate * torch.sigmoid(1.702 * gate) * (linear + 1)).bfloat16().double()
            y = mxfp4.dequantize(down[0][e], down[1][e], torch.float64) @ h + down[2][e].double()
            out[t] += weights[t, a].double() * y
    return out

HIDDEN, INNER, EXPERTS, ACTIVE = 96, 64, 6, 4
up, down = make(EXPERTS, 2 * INNER, HIDDEN, 1), make(EXPERTS, HIDDEN, INNER, 2)
for tokens, routing in ((1, "mixed"), (3, "mixed"), (20, "skewed"), (5, "absent")):
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=g).bfloat16()
    pool = ACTIVE if routing == "skewed" else EXPERTS
    ids = torch.stack([torch.randperm(pool, generator=g)[:ACTIVE] for _ in range(tokens)]).int()
    if routing == "absent":
        ids[ids > 2] = -1
    weights = torch.rand(tokens, ACTIVE, generator=g)
    out = experts_triton.few_token_experts(x, ids, weights, up, down, alpha=1.702, limit=7.0)
    wanted = reference(x, ids, weights, up, down)
    # The interpreter cuts to bfloat16 where a GPU rounds: below 2^-7 for the activation, and again for the output.
    error = ((out.double() - wanted).norm() / wanted.norm()).item()
    assert error < 2**-6, (tokens, routing, error)
"""

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm_gptoss.kernels.experts_triton import KERNELS

SHAPES = {"ACTIVE": 4, "C": 2880, "N": 2880, "PAIRS": 32, "TOKENS": 16, "BN": 32, "BK": 64}
TYPES = {"x": "*bf16", "act": "*bf16", "out": "*bf16", "ids": "*i32", "weights": "*fp32", "blocks": "*u8",
         "scales": "*u8", "bias": "*bf16", "parts": "*fp32", "pairs": "i32", "alpha": "fp32", "limit": "fp32"}
target = GPUTarget(sys.argv[1], int(sys.argv[2]) if sys.argv[2].isdigit() else sys.argv[2], int(sys.argv[3]))
for name, kernel in KERNELS.items():
    signature = {a: TYPES.get(a, "constexpr") for a in kernel.arg_names}
    constants = {a: SHAPES[a] for a in kernel.arg_names if a in SHAPES}
    triton.compile(ASTSource(kernel, signature, constants), target=target)
"""


def run(code: str, *arguments: str, **environment: str) -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET once, at import."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_few_tokens_skew_and_absent_experts_match_float64() -> None:
    run(RUN, TRITON_INTERPRET="1")


@pytest.mark.parametrize(
    "target",
    [("cuda", "80", "32"), ("cuda", "89", "32"), ("cuda", "90", "32"), ("cuda", "100", "32"), ("cuda", "120", "32"),
     ("hip", "gfx942", "64"), ("hip", "gfx950", "64")],
    ids=lambda target: target[1],
)  # fmt: skip
def test_every_kernel_compiles_without_a_gpu(target: tuple[str, str, str], tmp_path: Path) -> None:
    run(COMPILE, *target, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
