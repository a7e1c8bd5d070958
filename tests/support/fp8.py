"""An e4m3 KV cache in torch: what vLLM writes into one, and what it holds."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gptoss.engine.kernels.cache import Fp8Cache, PagedCache

HEAD = 64
LARGEST = 448.0
NAN = 0x7F
SCALES = ((1.0, 1.0), (0.02, 3.0), (2.0**-100, 2.0**-110), (2.0**100, 2.0**110))
"""Of keys and of values: none, calibrated ones, small and large ones, of which outputs are normal numbers."""
EXTREMES = (*SCALES, (0.0, 2.0**-140), (2.0**-149, 3.4e38))
"""The same, zero, subnormal ones and the largest, for what is written."""


def codes(rows: Tensor, k_scale: Tensor, v_scale: Tensor) -> Tensor:
    """The codes, uint8, of rows [..., 128] of bf16, keys and values.

    As vLLM's `reshape_and_cache_flash`: float32 division, nearest even, saturation; NaN stays NaN. The scales are
    tensors, because torch multiplies by the reciprocal of a number.
    """
    scale = torch.cat([each.float().expand(HEAD) for each in (k_scale, v_scale)]).to(rows.device)
    quotient = rows.bfloat16().float() / scale
    made = quotient.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(quotient.isnan(), NAN, made)


def values(cache: PagedCache) -> Tensor:
    """[blocks, K, block size, 128]: keys and values of a cache; float64 if it is of codes."""
    if not isinstance(cache, Fp8Cache):
        return cache
    found = cache.tensor.view(torch.float8_e4m3fn).double()
    return torch.cat([found[..., :HEAD] * cache.k_scale.double(), found[..., HEAD:] * cache.v_scale.double()], dim=-1)


def cache_of(cache: Tensor, scales: tuple[float, float] | None) -> PagedCache:
    """The bf16 cache, or one of its values' codes, which then have the scales. Strides are kept."""
    if scales is None:
        return cache
    one, (k_scale, v_scale) = (
        torch.ones((), device=cache.device),
        (torch.tensor(s, device=cache.device) for s in scales),
    )
    made = torch.empty_strided(cache.shape, cache.stride(), dtype=torch.uint8, device=cache.device)
    return Fp8Cache(made.copy_(codes(cache, one, one)), k_scale, v_scale)
