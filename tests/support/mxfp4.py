"""MXFP4 the other way: values to codes, and stored layouts back to the checkpoint's."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.reference import E2M1_VALUES, E8M0_BIAS, E8M0_VALUES
from vllm_gptoss.engine import spec

E2M1_MAX_EXPONENT = 2
"""Exponent of the largest e2m1 value, 6 = 1.5 x 2^2."""


def pack(codes: Tensor) -> Tensor:
    """codes: [..., 32G] uint8 below 16; returns blocks [..., G, 16] uint8."""
    assert codes.dtype == torch.uint8
    assert codes.shape[-1] % spec.MXFP4_GROUP == 0
    pairs = codes.reshape(*codes.shape[:-1], -1, spec.MXFP4_GROUP // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise as MX §6.3: scale 2^(floor(log2(amax)) - 2), nearest e2m1 (ties to even), saturating at 6.

    x: [..., 32G] finite; returns (blocks [..., G, 16] uint8, scales [..., G] uint8).
    A group of zeros gets scale 2^-127.
    """
    assert x.shape[-1] % spec.MXFP4_GROUP == 0
    assert bool(x.isfinite().all())
    groups = x.to(torch.float64).reshape(*x.shape[:-1], -1, spec.MXFP4_GROUP)
    # frexp gives m x 2^e with m in [0.5, 1), so floor(log2(amax)) is e - 1; unlike log2 it is exact.
    exponent = torch.frexp(groups.abs().amax(-1)).exponent - 1 - E2M1_MAX_EXPONENT
    exponent = exponent.masked_fill((groups == 0).all(-1), -E8M0_BIAS).clamp(-E8M0_BIAS, E8M0_BIAS)
    scale = torch.tensor(E8M0_VALUES, dtype=torch.float64, device=x.device)[(exponent + E8M0_BIAS).long()]
    scaled = groups / scale[..., None]
    magnitudes = torch.tensor(E2M1_VALUES[:8], dtype=torch.float64, device=x.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    # A value in the middle rounds to the neighbour with an even code (mantissa bit 0).
    up, down = (torch.bucketize(scaled.abs(), middles, right=r) for r in (True, False))
    codes = torch.where(up % 2 == 0, up, down) + 8 * (scaled.signbit()).long()
    return pack(codes.to(torch.uint8).reshape(x.shape)), (exponent + E8M0_BIAS).to(torch.uint8)


def hopper_values_inverse(values: Tensor) -> Tensor:
    """[E, N/4, C*2] u8 back to [E, N, C/2] u8."""
    experts, quads, width = values.shape
    x = untwiddle(values).view(experts, quads // 4, 4, width // 128, 2, 4, 4, 2, 2)
    x = x.permute(0, 1, 8, 2, 4, 3, 6, 7, 5)
    return x.reshape(experts, quads * 4, width // 4)


def untwiddle(x: Tensor) -> Tensor:
    """The inverse of `twiddle`."""
    b = x.reshape(*x.shape[:-1], -1, 4).to(torch.int64)
    word = b[..., 0] | (b[..., 1] << 8) | (b[..., 2] << 16) | (b[..., 3] << 24)
    mask = 0x81C081C0
    last = ((word << 1) & 0x80008000) | ((word >> 3) & 0x01800180) | ((word >> 7) & 0x00400040)
    pairs = torch.stack([word & mask, (word << 3) & mask, (word << 6) & mask, last], dim=-1)

    def nibble(bits: Tensor) -> Tensor:
        return ((bits >> 12) & 0x8) | ((bits >> 6) & 0x7)

    return (nibble(pairs & 0xFFFF) | (nibble(pairs >> 16) << 4)).to(torch.uint8).flatten(-2)


def hopper_scales_inverse(stored: Tensor, rows: int, groups: int) -> Tensor:
    """Back to [E, rows, groups] u8."""
    experts, lines, width = stored.shape
    x = stored.view(experts, lines // 8, 8, width // 64, 2, 8, 2, 2)
    x = x.permute(0, 1, 4, 2, 7, 5, 3, 6)
    return x.reshape(experts, lines * 32, width // 32)[:, :rows, :groups]
