"""Risk of reading Marlin's layout: a weight, a scale or a bias is at another address than vLLM stores it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.marlin import bias_of, codes_of, registers, scales_of
from vllm_gptoss.engine.experts.marlin import marlin_bias, marlin_scales, marlin_values

ROWS, COLUMNS = 192, 256


def test_the_maps_are_those_of_vllm() -> None:
    """vLLM's permutations in torch. benchmarks/sm80_experts.py compares its GPU kernel, which repacks the values."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4, marlin_utils_test

    torch.manual_seed(1)
    blocks = torch.randint(0, 256, (1, ROWS, COLUMNS // 2), dtype=torch.uint8)
    codes = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-2)[0]
    perm = marlin_utils_test.get_weight_perm(4)
    wanted = marlin_utils_test.marlin_weights(codes.T.int().contiguous(), COLUMNS, ROWS, 4, perm)
    assert torch.equal(marlin_values(blocks)[0].contiguous().view(torch.int32), wanted)

    scales = torch.randint(1, 255, (1, ROWS, COLUMNS // 32), dtype=torch.uint8)
    real = scales[0].view(torch.float8_e8m0fnu).to(torch.bfloat16).T
    permuted = marlin_utils.marlin_permute_scales(real, COLUMNS, ROWS, 32)
    stored = marlin_utils_fp4.mxfp4_marlin_process_scales(permuted)
    assert torch.equal(marlin_scales(scales)[0], stored.view(torch.uint8))

    bias = torch.randn(2, ROWS)
    assert torch.equal(marlin_bias(bias)[1], marlin_utils.marlin_permute_bias(bias[1]))
    assert torch.equal(codes_of(marlin_values(blocks))[0], codes)
    assert torch.equal(scales_of(marlin_scales(scales)), scales)
    assert torch.equal(bias_of(marlin_bias(bias)), bias)


def lane(g: int, j: int) -> tuple[list[int], list[int]]:
    """Rows and columns in a tile of the eight elements of A that lane 4 g + j of mma.m16n8k16 holds, a0 to a3."""
    rows = [g, g, g + 8, g + 8] * 2
    columns = [2 * j, 2 * j + 1] * 2 + [2 * j + 8, 2 * j + 9] * 2
    return rows, columns


@pytest.mark.parametrize(("g", "j"), [(0, 0), (3, 1), (7, 3)])
def test_a_lane_decodes_its_operand_from_its_sixteen_bytes(g: int, j: int) -> None:
    """`marlin_registers` of marlin.cuh, with the constants of that file."""
    torch.manual_seed(2)
    blocks = torch.randint(0, 256, (1, ROWS, COLUMNS // 2), dtype=torch.uint8)
    codes = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-2)[0]
    stored = marlin_values(blocks)[0].contiguous()
    for tile, unit, at in ((0, 0, 0), (5, 2, 3), (15, 1, 1)):
        begin = unit * 512 + (4 * g + j) * 16
        words = stored[tile, begin : begin + 16].contiguous().numpy().view(np.uint32)
        found = registers(torch.tensor([int(words[at])]))
        rows, columns = lane(g, j)
        wanted = codes[unit * 64 + at * 16 + torch.tensor(rows), tile * 16 + torch.tensor(columns)]
        assert torch.equal(found[0], wanted)


def test_every_word_decodes() -> None:
    """Carries of the products: each byte of a word takes all values beside zeros and ones."""
    values = torch.arange(256)
    for rest in (0, 0xFFFFFFFF):
        for byte in range(4):
            words = (values << 8 * byte) | (rest & ~(0xFF << 8 * byte))
            nibbles = torch.stack([words >> 4 * i & 0xF for i in (0, 4, 2, 6, 1, 5, 3, 7)], -1)
            assert torch.equal(registers(words), nibbles)


def test_scales_and_bias_of_a_lane() -> None:
    scales: Tensor = torch.arange(64, dtype=torch.uint8).view(1, 64, 1)
    stored = marlin_scales(scales)[0, 0].view(8, 8)
    for g in range(8):
        assert stored[g].tolist() == [g, g + 16, g + 8, g + 24, g + 32, g + 48, g + 40, g + 56]
    bias = marlin_bias(torch.arange(64.0)[None])[0]
    row = torch.arange(64)
    assert torch.equal(bias[(row & ~31) + (row >> 1 & 3) * 8 + (row >> 3 & 3) * 2 + (row & 1)], row.float())
