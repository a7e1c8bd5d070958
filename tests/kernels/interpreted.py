"""The Triton expert kernels in Triton's interpreter against float64: `python -m tests.kernels.interpreted`.

Needs TRITON_INTERPRET=1: a process of its own, because Triton reads the variable once, at import.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vllm_gptoss import reference
from vllm_gptoss.kernels import experts_triton

HIDDEN, INNER, EXPERTS, ACTIVE = 96, 64, 6, 4
Side = tuple[Tensor, Tensor, Tensor]


def make(rows: int, columns: int, seed: int) -> Side:
    """Blocks, scales and bias of one projection."""
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8, generator=g)
    scales = torch.randint(118, 126, (EXPERTS, rows, columns // 32), dtype=torch.uint8, generator=g)
    return blocks, scales, torch.randn(EXPERTS, rows, generator=g).bfloat16()


def oracle(x: Tensor, ids: Tensor, weights: Tensor, up: Side, down: Side) -> Tensor:
    sides: list[Tensor] = []
    for blocks, scales, bias in (up, down):
        weight = reference.mxfp4_dequantise(blocks.unflatten(-1, (-1, 16)), scales, torch.float64)
        sides += [weight, bias.double()]
    there = ids >= 0
    return reference.experts_forward(x.double(), (weights * there).double(), ids.clamp(min=0).long(), *sides)


def main() -> None:
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is not set"
    up, down = make(2 * INNER, HIDDEN, 1), make(HIDDEN, INNER, 2)
    for tokens, routing in ((1, "mixed"), (3, "mixed"), (20, "skewed"), (5, "absent")):
        g = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, HIDDEN, generator=g).bfloat16()
        pool = ACTIVE if routing == "skewed" else EXPERTS
        ids = torch.stack([torch.randperm(pool, generator=g)[:ACTIVE] for _ in range(tokens)]).int()
        if routing == "absent":
            ids[ids > 2] = -1
        weights = torch.rand(tokens, ACTIVE, generator=g)
        out = experts_triton.few_token_experts(x, ids, weights, up, down, alpha=1.702, limit=7.0)
        wanted = oracle(x, ids, weights, up, down)
        # The interpreter cuts to bfloat16 where a GPU rounds: below 2^-7 for the activation, and again for the output.
        error = float((out.double() - wanted).norm() / wanted.norm())
        print(f"{tokens} tokens, {routing}: {error:.2e}")
        assert error < 2**-6, (tokens, routing, error)


if __name__ == "__main__":
    main()
