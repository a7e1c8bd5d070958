"""The weight layout that the sm90 kernels read: index maps, their inverses, and upstream's code where it is there."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.mxfp4 import hopper_scales_inverse, hopper_values_inverse, untwiddle
from vllm_gptoss.engine.experts import mxfp4, sm90
from vllm_gptoss.engine.kernels.experts import Projection

HIDDEN = 2880
SHAPES = [
    (rows, columns)
    for intermediate in (2880, 1472, 768, 384)  # 2880 / TP for TP 1, 2, 4, 8, rounded up to 64 as vLLM does
    for rows, columns in ((2 * intermediate, HIDDEN), (HIDDEN, intermediate))
]


def random_weights(rows: int, columns: int, experts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    blocks = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
    return blocks, scales


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_maps_invert_for_every_rank(rows: int, columns: int) -> None:
    blocks, scales = random_weights(rows, columns)
    assert torch.equal(hopper_values_inverse(mxfp4.hopper_values(blocks)), blocks)
    stored = mxfp4.hopper_scales(scales)
    assert torch.equal(hopper_scales_inverse(stored, rows, columns // 32), scales)
    values, exponents = sm90.sample(blocks, scales)
    assert sm90._begins_with(mxfp4.hopper_values(blocks), values)
    assert sm90._begins_with(stored, exponents)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("moved", ["", "values", "scales"])
def test_a_layout_that_upstream_changed_is_found_at_load(
    monkeypatch: pytest.MonkeyPatch, moved: str, axis: int
) -> None:
    blocks, scales = random_weights(2 * 768, HIDDEN, experts=2)
    stored = {"values": mxfp4.hopper_values(blocks), "scales": mxfp4.hopper_scales(scales)}
    if moved:
        stored[moved] = stored[moved].roll(1, dims=axis)
    projection = Projection(stored["values"], stored["scales"], torch.zeros(2, 2 * 768))
    monkeypatch.setattr(sm90, "FewTokenExperts", lambda *_, **__: (_ for _ in ()).throw(ValueError("as far as that")))
    expected = (sm90.sample(blocks, scales),) * 2
    with pytest.raises(sm90.LayoutError, match="not the one these kernels read" if moved else "as far as that"):
        sm90.prepare(projection, projection, active=4, routed=2, expected=expected)


def test_the_comparison_takes_little_memory_and_one_thread() -> None:
    """The maps work in int64: a whole expert of the 20b would take half a GiB where load takes most. And torch puts
    work of GRAIN_SIZE elements (ATen/TensorIterator.h) on all cores, where several engines that start wait for one
    another: it took seconds a layer."""
    blocks, scales = random_weights(5760, HIDDEN)
    assert all(part.numel() < 32_768 for part in sm90.sample(blocks, scales))


def test_twiddle_puts_each_nibble_where_the_kernel_masks_it() -> None:
    word = torch.tensor([0x21, 0x43, 0x65, 0x87], dtype=torch.uint8)
    b = mxfp4.twiddle(word).to(torch.int64)
    packed = int(b[0] | b[1] << 8 | b[2] << 16 | b[3] << 24)
    mask = 0x81C081C0
    registers = [
        packed & mask,
        (packed << 3) & mask,
        (packed << 6) & mask,
        ((packed << 1) & 0x80008000) | ((packed >> 3) & 0x01800180) | ((packed >> 7) & 0x00400040),
    ]
    for register, byte in zip(registers, word.tolist(), strict=True):
        for half, code in ((register & 0xFFFF, byte & 15), (register >> 16, byte >> 4)):
            # A bfloat16 with the bit pattern s......eem...... is the e2m1 value times 2^-126.
            value = (
                torch.tensor([half << 16], dtype=torch.int64).to(torch.int32).view(torch.float32).double() * 2.0**126
            )
            assert value.item() == mxfp4.VALUES[code]


def test_the_fourth_pair_of_every_word_is_what_a_product_and_two_masks_leave() -> None:
    """Tests `fourth` of mxfp4.cuh with the constants of that file: no carry of the product reaches a pair."""
    code = (Path(sm90.__file__).parents[1] / "kernels" / "cuda" / "mxfp4.cuh").read_text()
    found = re.search(r"__byte_perm\(w, 0, 0x3311\) & 0x(\w+)u\) \* (\d+)u\) & 0x(\w+)u;", code)
    before, factor, after = int(found[1], 16), int(found[2]), int(found[3], 16)
    low, high = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")  # of each half the upper byte
    permuted, packed = low * 0x101 | high * 0x1010000, low << 8 | high << 24
    wanted = ((packed << 1) & 0x80008000) | ((packed >> 3) & 0x01800180) | ((packed >> 7) & 0x00400040)
    assert torch.equal((permuted & before) * factor & 0xFFFFFFFF & after, wanted)


def test_one_lane_finds_its_operand_in_sixteen_bytes() -> None:
    """Lane (g, t) of mma.m16n8k16 holds rows g and g + 8, columns 2t, 2t + 1 and 8 more, of four steps."""
    blocks, _ = random_weights(32, 128, experts=1)
    stored = mxfp4.hopper_values(blocks)[0]
    for tile, column, lane in ((0, 0, 0), (1, 1, 13), (1, 0, 31), (0, 1, 6)):
        g, t = lane >> 2, lane & 3
        at = column * 128 + (g & 1) * 64 + t * 16
        found = untwiddle(stored[tile * 4 + (g >> 1), at : at + 16])
        wanted = [
            blocks[0, tile * 16 + g + 8 * high, column * 32 + 8 * step + 4 * half + t]
            for step in range(4)
            for half in range(2)
            for high in range(2)
        ]
        assert found.tolist() == [int(value) for value in wanted]


def test_dequantize_is_exact() -> None:
    blocks, scales = random_weights(16, 64, experts=1)
    scales = scales.clamp(2, 252)
    assert torch.equal(mxfp4.dequantize(blocks, scales).double(), mxfp4.dequantize(blocks, scales, dtype=torch.float64))


CACHE = Path(os.environ.get("GPTOSS_CACHE", Path(__file__).parents[3] / ".cache"))


def _upstream(name: str) -> ModuleType:
    """A layout module of the triton_kernels that vLLM carries: of the installed one, or of the unpacked release."""
    found = importlib.util.find_spec("vllm")
    roots = [Path(folder) for folder in (found.submodule_search_locations or [] if found else [])]
    roots += sorted(CACHE.glob("vllm-*/vllm"), reverse=True)
    folders = [root / "third_party/triton_kernels/tensor_details/layout_details" for root in roots]
    folder = next((folder for folder in folders if (folder / f"{name}.py").exists()), None)
    if folder is None:
        pytest.skip("no triton_kernels: a CPU build of vLLM, and scripts/vllm_source.py has not run")
    package = importlib.util.module_from_spec(
        importlib.util.spec_from_loader("layout_details", loader=None, is_package=True)
    )
    package.__path__ = [str(folder)]
    sys.modules["layout_details"] = package
    return importlib.import_module(f"layout_details.{name}")


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_maps_are_upstreams(rows: int, columns: int) -> None:
    values, scales_layout = _upstream("hopper_value"), _upstream("hopper_scale")
    blocks, scales = random_weights(rows, columns)
    wrapped = blocks.transpose(-2, -1)
    ours = values.HopperMXValueLayout(wrapped.shape, mx_axis=1).swizzle_data(wrapped).mT
    assert torch.equal(ours, mxfp4.hopper_values(blocks))
    padded = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4)).transpose(-2, -1)
    stored = scales_layout.HopperMXScaleLayout(padded.shape, mx_axis=1, num_warps=8).swizzle_data(padded).mT
    assert torch.equal(stored, mxfp4.hopper_scales(scales))
