"""MXFP4 experts as vLLM's Marlin kernel stores them, as index maps.

Source: vLLM 0.33.0's `gptq_marlin_repack` for 4 bits and 16-bit activations, and `marlin_utils.py`. The kernels of
`kernels/cuda/marlin.cuh` read these layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def marlin_values(blocks: Tensor) -> Tensor:
    """Packs MXFP4 values as Marlin stores them.

    blocks: [E, N, C/2] u8 low nibble first, N a multiple of 64, C of 16; returns [E, C/16, N*8] u8.

    512 bytes are 64 rows x 16 columns: of each lane of mma.m16n8k16 a 32-bit word for each of four tiles of 16 rows.
    """
    experts, rows, half = blocks.shape
    codes = torch.stack((blocks & 0xF, blocks >> 4), dim=-1)
    x = codes.view(experts, rows // 64, 4, 2, 8, half // 8, 2, 4, 2)
    # axes: e, 64 rows, row tile (4), row half (2), row (8), 16 columns, column half (2), lane in quad (4), column (2)
    x = x.permute(0, 5, 1, 4, 7, 2, 8, 3, 6)
    return (x[..., 0] | x[..., 1] << 4).reshape(experts, half // 8, rows * 8)


def marlin_scales(scales: Tensor) -> Tensor:
    """Orders e8m0 scales as Marlin stores them. scales: [E, N, G] u8, N a multiple of 64; returns [E, G, N] u8."""
    experts, rows, groups = scales.shape
    x = scales.view(experts, rows // 64, 2, 2, 2, 8, groups)
    # axes: e, 64 rows, two row tiles (2), row tile (2), row half (2), row (8), group
    return x.permute(0, 6, 1, 5, 2, 4, 3).reshape(experts, groups, rows)


def marlin_bias(bias: Tensor) -> Tensor:
    """Orders a bias as Marlin stores it. bias: [E, N], N a multiple of 32; returns [E, N]."""
    return bias.view(len(bias), -1, 4, 4, 2).transpose(2, 3).reshape(bias.shape)
