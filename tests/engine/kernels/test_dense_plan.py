"""Risks of the dense kernels that need no GPU: a plan without room for all rows, memory a block may not have, a struct
that differs between host and device, source that does not compile. That each row is done once is for `tests/gpu`."""

from __future__ import annotations

import pytest

from tests.engine.kernels.cubins import compiled
from vllm_gptoss.engine.kernels import cache, dense, nvrtc
from vllm_gptoss.engine.kernels.dense import DensePlan, Mode, plan

MULTIPROCESSORS = (132, 114, 78)
"""H100 SXM / H200, H100 PCIe, and the smallest sm90 part."""
SHAPES = [
    *((Mode.QKV, 5120 // parallel, 2880) for parallel in (1, 2, 4, 8)),
    *((Mode.OUT, 2880, 4096 // parallel) for parallel in (1, 2, 4, 8)),
    *((Mode.ROUTER, experts, 2880) for experts in (32, 128)),
]


def every_plan() -> list[DensePlan]:
    return [
        plan(mode, rows, columns, tokens, sms, 4)
        for mode, rows, columns in SHAPES
        for tokens in (1, 8, 9, 16)
        for sms in MULTIPROCESSORS
    ]


@pytest.mark.parametrize("of", every_plan(), ids=str)
def test_blocks_have_room_for_all_rows_and_none_is_idle(of: DensePlan) -> None:
    assert of.grid <= of.rows // dense.UNIT <= of.grid * of.units


@pytest.mark.parametrize("of", every_plan(), ids=str)
def test_a_block_fits_the_multiprocessor(of: DensePlan) -> None:
    assert of.part % of.warps == 0
    assert of.columns % (of.part * dense.BLOCK) == 0
    assert of.block <= 1024
    # biases, cosines, norm weight, partial sums of squares: ptxas reports 15.3 KB at most, with an fp8 cache 20.3
    static = (21 if of.mode is Mode.QKV else 16) * 1024
    assert of.shared_bytes + static <= dense.SHARED_LIMIT
    sums = of.warps * of.units * of.token_groups * 8 * dense.UNIT * 4
    assert sums <= of.shared_bytes
    if of.mode is Mode.ROUTER:
        assert of.grid <= 8, "a portable cluster has at most 8 blocks"


def test_rows_of_a_stage_use_all_banks() -> None:
    # eight lanes read 16 bytes each of two rows at once: 32 banks of 4 bytes must not meet twice
    for of in every_plan():
        pitch = of.part * 128 + 16
        for row in range(0, 8, 2):
            banks = [
                ((row + r) * pitch + j * 32 + byte) // 4 % 32
                for r in (0, 1)
                for j in range(4)
                for byte in (0, 4, 8, 12)
            ]
            assert len(set(banks)) == 32


@pytest.mark.parametrize("tokens", [0, 17])
def test_too_many_tokens_are_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match="1 to 16 tokens"):
        plan(Mode.OUT, 2880, 4096, tokens, 132)


def test_shapes_without_a_plan_say_why() -> None:
    assert dense.unsupported(Mode.OUT, 2880, 4000) == "4000 columns are not a multiple of 64"
    assert dense.unsupported(Mode.QKV, 5128, 2880) == "5128 rows do not divide into units"
    assert dense.unsupported(Mode.ROUTER, 40, 2880) == "40 experts are not a multiple of 32"
    assert dense.unsupported(Mode.OUT, 2880, 64 * 7) == "448 columns do not divide among 8 to 16 warps"
    for mode, rows, columns in SHAPES:
        assert dense.unsupported(mode, rows, columns) is None


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("tokens", [8, 16])
def test_it_compiles_for_sm90_without_a_gpu(mode: Mode, tokens: int) -> None:
    source = nvrtc.source(dense.SOURCE)
    elements = (cache.BF16, cache.E4M3) if mode is Mode.QKV else (cache.BF16,)
    shapes = [(rows, columns) for m, rows, columns in SHAPES if m is mode]
    for of in {plan(mode, *shape, tokens, 132, 4, element) for shape in shapes for element in elements}:
        cubin = compiled(source, "sm_90", [f"-D{name}={value}" for name, value in of.macros.items()])
        assert b"dense_few" in cubin
