"""Layers of experts without memory, for code that only reads their shapes."""

from __future__ import annotations

import torch

from vllm_gptoss.engine.kernels import experts
from vllm_gptoss.engine.kernels.experts_many import ManyTokenExperts

SHAPES = [
    (32, 2880, 2880, 4, 32),
    (128, 2880, 2880, 4, 128),
    (24, 2880, 2880, 4, 24),
    (16, 2880, 2880, 4, 32),
    (64, 1024, 2048, 8, 64),
    (32, 1472, 2880, 4, 32),
    (128, 384, 2880, 4, 128),
]
"""Local experts, intermediate, hidden, active and routed: 20b, 120b, odd ones, a rank of TP 2 and of TP 8."""


def prepared(count: int, intermediate: int, hidden: int, active: int, routed: int) -> ManyTokenExperts:
    def rank(rows: int, columns: int) -> experts.Projection:
        values = torch.empty(count, rows // 4, columns * 2, dtype=torch.uint8, device="meta")
        lines, width = -(-rows // 256) * 8, -(-columns // 128) * 2 * 64
        scales = torch.empty(count, lines, width, dtype=torch.uint8, device="meta")
        return experts.Projection(values, scales, torch.empty(count, rows, device="meta"))

    mapped = None if routed == count else torch.empty(routed, dtype=torch.int32, device="meta")
    few = experts.FewTokenExperts(
        rank(2 * intermediate, hidden),
        rank(hidden, intermediate),
        active,
        routed,
        alpha=1.7,
        limit=7.0,
        expert_map=mapped,
    )
    return ManyTokenExperts(few)
