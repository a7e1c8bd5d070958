"""From Marlin's layout back to rows and columns: the inverse of `vllm_gptoss.engine.experts.marlin`, and what a kernel
reads of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from vllm_gptoss.engine.kernels import experts


def codes_of(values: Tensor) -> Tensor:
    """values: [E, C/16, N*8] u8; returns e2m1 codes [E, N, C] u8."""
    count, tiles, width = values.shape
    x = torch.stack((values & 0xF, values >> 4), -1).view(count, tiles, width // 512, 8, 4, 4, 2, 2, 2)
    # axes: e, 16 columns, 64 rows, row, lane in quad, row tile, column, row half, column half
    return x.permute(0, 2, 5, 7, 3, 1, 8, 4, 6).reshape(count, width // 8, tiles * 16)


def scales_of(scales: Tensor) -> Tensor:
    """scales: [E, G, N] u8; returns [E, N, G]."""
    count, groups, rows = scales.shape
    x = scales.view(count, groups, rows // 64, 8, 2, 2, 2)
    # axes: e, group, 64 rows, row, two row tiles, row half, row tile
    return x.permute(0, 2, 4, 6, 5, 3, 1).reshape(count, rows, groups)


def bias_of(bias: Tensor) -> Tensor:
    """bias: [E, N]; returns [E, N]."""
    return bias.view(len(bias), -1, 4, 4, 2).transpose(2, 3).reshape(bias.shape)


def registers(words: Tensor) -> Tensor:
    """What `marlin_registers` of marlin.cuh makes of 32-bit words [n]: e2m1 codes [n, 8] of a0 to a3, two of each."""
    code = (experts.SOURCE.parent / "marlin.cuh").read_text()
    mask, first, second = (int(re.findall(rf"{name} = 0x(\w+)u", code)[0], 16) for name in ("M", "FIRST", "SECOND"))
    upper = (words >> 8 & 0xFF) | (words >> 24 & 0xFF) << 16
    sources, masks = {"w": words, "upper": upper}, {"FIRST": first, "SECOND": second}
    found = {}
    for index, source, name, factor in re.findall(r"a\[(\d)\] = \(\((\w+) & (\w+)\) \* (\d+)u\) & M;", code):
        register = ((sources[source] & masks[name]) * int(factor) & 0xFFFFFFFF) & mask
        halves = [register & 0xFFFF, register >> 16]
        found[int(index)] = [half >> 12 & 8 | half >> 6 & 7 for half in halves]
    return torch.stack([half for index in range(4) for half in found[index]], -1)
