"""What the driver refuses of a tensor map is an error with its numbers; the kernels' tests check what it takes."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.gpu.marks import SM90
from vllm_gptoss.engine.kernels.nvrtc import NvrtcError
from vllm_gptoss.engine.kernels.tensor_map import ALIGNMENT, tensor_map

pytestmark = SM90


def test_a_map_is_made_where_the_driver_wants_it() -> None:
    made = tensor_map(torch.zeros(64, 256, dtype=torch.uint8, device="cuda"), (32, 64), (16, 64), 128)
    assert any(made.words)
    assert ctypes.addressof(made) % ALIGNMENT == 0


@pytest.mark.parametrize(("sizes", "box"), [((32, 64), (16, 257)), ((33, 62), (16, 16)), ((32, 64), (1, 16))])
def test_what_the_driver_refuses_names_sizes_and_box(sizes: tuple[int, int], box: tuple[int, int]) -> None:
    """A box of more than 256 rows, rows that are no multiple of 16 bytes, a box narrower than 16 bytes."""
    with pytest.raises(NvrtcError, match=rf"map of \({sizes[0]}, {sizes[1]}\) in boxes of \({box[0]}, {box[1]}\)"):
        tensor_map(torch.zeros(64, 264, dtype=torch.uint8, device="cuda"), sizes, box, 128)
