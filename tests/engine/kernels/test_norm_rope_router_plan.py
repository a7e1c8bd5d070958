"""Risks of the kernels around the products that need no GPU: a router without all columns, more shared memory than
there is, arguments that differ between host and device, source that does not compile."""

from __future__ import annotations

import pytest

from tests.engine.kernels.cubins import compiled
from vllm_gptoss.engine.kernels import norm_rope_router, nvrtc
from vllm_gptoss.engine.kernels.norm_rope_router import RoutePlan, plan, unsupported

SHAPES = [(2880, 32, 4), (2880, 128, 4), (2048, 64, 8), (4096, 96, 1)]
SHARED, OF_A_BLOCK = 227 << 10, 1 << 10
"""Shared memory of a multiprocessor of Hopper, and what the driver takes of it for each block."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_cluster_has_all_columns_and_fits(shape: tuple[int, int, int]) -> None:
    made = plan(*shape)
    assert made.cluster * made.warps * 64 == shape[0]
    assert made.cluster <= 8, "a portable cluster has at most 8 blocks"
    assert made.macros["MIN_CTAS"] * (made.shared_bytes + OF_A_BLOCK) <= SHARED


def test_shapes_without_a_plan_say_why() -> None:
    assert unsupported(2890, 32, 4) == "2890 columns are not a multiple of 64 up to 8192"
    assert unsupported(8256, 32, 4) == "8256 columns are not a multiple of 64 up to 8192"
    assert unsupported(47 * 64, 32, 4) == "3008 columns do not divide among clusters of up to 8 x 16 warps"
    assert unsupported(2880, 40, 4) == "40 experts, not 32, 64, 96 or 128"
    assert unsupported(2880, 32, 33) == "33 of 32 experts a token, more than 32 or all"
    with pytest.raises(ValueError, match="40 experts"):
        plan(2880, 40, 4)


@pytest.mark.parametrize("made", [plan(*shape) for shape in SHAPES], ids=str)
def test_the_router_compiles(made: RoutePlan) -> None:
    options = [f"-D{key}={value}" for key, value in sorted(made.macros.items())]
    assert compiled(nvrtc.source(norm_rope_router.CUDA / "route_many.cu"), "sm_90", options)


def test_norm_and_rope_compile() -> None:
    assert compiled(nvrtc.source(norm_rope_router.CUDA / "norm_many.cu"), "sm_90", ["-DCOLUMNS=2880"])
    for element in ("Bf16", "E4m3"):
        assert compiled(nvrtc.source(norm_rope_router.CUDA / "rope_many.cu"), "sm_90", [f"-DCACHE={element}"])
