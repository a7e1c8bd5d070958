"""The paged KV cache of a layer as the kernels take it: bf16, or e4m3 codes with the layer's two scales.

`cuda/cache.cuh` has the element types. A kernel is compiled for one of them: its plan names it, its macro is CACHE.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, Union

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BF16: Final = "Bf16"
E4M3: Final = "E4m3"
VLLM_E4M3: Final = ("fp8", "fp8_e4m3")
"""vLLM's values of `--kv-cache-dtype` for such a cache. Its tensor's dtype is uint8."""
E4M3_TENSORS: Final = ("uint8", "float8_e4m3fn")
"""Dtypes of a tensor of codes."""


@dataclass(frozen=True, slots=True)
class Fp8Cache:
    """tensor: [blocks, K, block size, 128] e4m3 codes, K at 0, V at 64; k_scale, v_scale: one float32 each on the GPU.

    A code times its scale is the key or value. Kernels read the scales by address when they run, so that vLLM may
    change them in place.
    """

    tensor: Tensor
    k_scale: Tensor
    v_scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape


PagedCache: TypeAlias = Union["Tensor", Fp8Cache]
"""A tensor is a cache of bf16, [blocks, K, block size, 128], K at 0, V at 64."""

SCALE_FIELDS = [(name, ctypes.c_void_p) for name in ("k_scale", "v_scale")]
"""The last fields of the arguments of a kernel with a cache."""


def element(cache: PagedCache) -> str:
    """The element type, `BF16` or `E4M3`."""
    return E4M3 if isinstance(cache, Fp8Cache) else BF16


def described(cache: PagedCache) -> dict[str, int]:
    """The fields of a kernel's arguments for the cache, without its scales. Strides are in elements."""
    tensor = cache.tensor if isinstance(cache, Fp8Cache) else cache
    return {
        "kv": tensor.data_ptr(),
        "kv_block": tensor.stride(0),
        "kv_head": tensor.stride(1),
        "kv_token": tensor.stride(2),
        "block_shift": tensor.shape[2].bit_length() - 1,
    }


def scales(cache: PagedCache) -> dict[str, int]:
    """`SCALE_FIELDS` by field; none for bf16."""
    if not isinstance(cache, Fp8Cache):
        return {}
    return {"k_scale": cache.k_scale.data_ptr(), "v_scale": cache.v_scale.data_ptr()}
