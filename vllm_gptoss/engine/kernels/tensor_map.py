"""Tensor maps: what Hopper's copy engine must know of a tensor to copy boxes of it.

CUDA driver API, `cuTensorMapEncodeTiled`; `cuda/tensor_map.cuh` is the device's side.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_gptoss.engine.kernels import nvrtc

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 64
UINT64 = 4
"""`CU_TENSOR_MAP_DATA_TYPE_UINT64`: a box's dimension has up to 256 elements, so wide ones have rows of 2 KiB."""
PROMOTION = {32: 0, 64: 1, 128: 2, 256: 3}
"""`CU_TENSOR_MAP_L2_PROMOTION_*`, by the minimum bytes of an L2 fetch."""


class TensorMap(ctypes.Structure):
    """A `CUtensorMap`, opaque."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def tensor_map(tensor: Tensor, sizes: Sequence[int], box: Sequence[int], promotion: int) -> TensorMap:
    """The map of a contiguous CUDA tensor, taken as elements of 8 bytes; any thread may make it.

    sizes, box: of the tensor and of what one instruction copies, in elements, the innermost first; promotion: bytes,
    one of `PROMOTION`.

    Raises:
        NvrtcError: the driver refused: an inner size is no multiple of 16 bytes, a box has more than 256 elements in a
            dimension.
    """
    rank = len(sizes)
    strides, bytes_before = [], 8
    for size in sizes[:-1]:
        bytes_before *= size
        strides.append(bytes_before)
    room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + ALIGNMENT)
    made = TensorMap.from_buffer(room, -ctypes.addressof(room) % ALIGNMENT)
    no_interleave = no_swizzle = zeros_outside = 0
    with nvrtc.current(tensor.device.index):
        status = nvrtc.driver().cuTensorMapEncodeTiled(
            ctypes.byref(made),
            UINT64,
            ctypes.c_uint32(rank),
            ctypes.c_void_p(tensor.data_ptr()),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * (rank - 1))(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            no_interleave,
            no_swizzle,
            PROMOTION[promotion],
            zeros_outside,
        )
    nvrtc.check(status, f"the tensor map of {tuple(sizes)} in boxes of {tuple(box)}")
    return made
