"""MXFP4 as bytes: the values, and the layouts that kernels read, as index maps with inverses.

Sources: OCP Microscaling Formats (MX) v1.0 §5.3 and §6.3; triton_kernels `HopperMXValueLayout` and
`HopperMXScaleLayout` as vLLM 0.33.0 vendors them. The plugin's sm90 kernels read these layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Values along C that share one scale."""

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The exact values of an MXFP4 tensor.

    blocks: [..., C/2] u8, low nibble first; scales: [..., C/32] u8, e8m0; returns [..., C] in `dtype`, exact in
    bfloat16 for scales from 2 to 252 (outside, the product leaves bfloat16's range).
    """
    table = torch.tensor(VALUES, dtype=dtype, device=blocks.device)
    codes = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    values = table[codes.int()].unflatten(-1, (-1, GROUP))
    # float64 reaches 2^-127 without a subnormal.
    factor = torch.exp2(scales.double() - 127)
    return (values * factor.unsqueeze(-1).to(dtype)).flatten(-2)


def hopper_values(blocks: Tensor) -> Tensor:
    """Packs MXFP4 values the way triton_kernels' `HopperMXValueLayout(mx_axis=1, mma_version=3)` stores them.

    blocks: [E, N, C/2] u8 low nibble first, N a multiple of 16, C of 64; returns [E, N/4, C*2] u8.

    A row of the result holds rows g', g'+1 and +8 of a 16-row tile; 16 of its bytes are one lane's A operand of four
    m16n8k16 steps. Four e2m1 of those steps share 16 bits: three at shifts 0, 3, 6 of the pattern s......eem......, the
    fourth in the holes (`twiddle`).
    """
    experts, rows, half = blocks.shape
    x = blocks.view(experts, rows // 16, 2, 4, 2, half // 32, 4, 2, 4)
    # axes: e, tile, row half (8), quad pair (4), parity (2), 64-column tile, k step (4), k half (2), lane in quad (4)
    x = x.permute(0, 1, 3, 5, 4, 8, 6, 7, 2)
    return twiddle(x.reshape(experts, rows // 4, half * 4))


def _spread(nibbles: Tensor) -> Tensor:
    return ((nibbles & 0x8) << 12) | ((nibbles & 0x7) << 6)


def twiddle(x: Tensor) -> Tensor:
    """Rearranges the bits of each four bytes (eight e2m1) so that four masks and shifts give four bf16x2."""
    b = x.reshape(*x.shape[:-1], -1, 4).to(torch.int64)
    pair = _spread(b) | (_spread(b >> 4) << 16)
    low, high = b[..., 3] & 0xF, b[..., 3] >> 4

    def fourth(n: Tensor) -> Tensor:
        return ((n & 0x8) << 11) | ((n & 0x6) << 9) | ((n & 0x1) << 13)

    word = pair[..., 0] | (pair[..., 1] >> 3) | (pair[..., 2] >> 6) | fourth(low) | (fourth(high) << 16)
    return torch.stack([(word >> s) & 0xFF for s in (0, 8, 16, 24)], dim=-1).to(torch.uint8).flatten(-2)


def hopper_scales(scales: Tensor) -> Tensor:
    """Orders e8m0 scales as triton_kernels' `HopperMXScaleLayout(mx_axis=1, num_warps=8)` stores them.

    scales: [E, N, G] u8; returns [E, ceil(N/256)*8, ceil(G/4)*4*32] u8, padded with zeros. vLLM pads G to a multiple
    of 4 before (its `_swizzle_mxfp4`), so this does too.
    """
    experts, rows, groups = scales.shape
    x = torch.nn.functional.pad(scales, (0, -groups % 4, 0, -rows % 256))
    x = x.view(experts, x.shape[1] // 256, 2, 8, 2, 8, x.shape[2] // 2, 2)
    # axes: e, block of 256 rows, half (128), warp (16), row half (8), row, pair of groups, group
    x = x.permute(0, 1, 3, 6, 2, 5, 7, 4)
    return x.reshape(experts, x.shape[1] * 8, -1).contiguous()
