"""Risks of the products that need no GPU: rows that nobody has, more shared memory than there is, a ring too short,
arguments that differ between host and device, source that does not compile."""

from __future__ import annotations

import pytest

from tests.kernels.cubins import compiled
from tests.kernels.structs import declared
from vllm_gptoss.kernels import nvrtc, product_many
from vllm_gptoss.kernels.dense import SHARED_LIMIT
from vllm_gptoss.kernels.product_many import CLUSTER, ProductPlan, plan, unsupported

SHAPES = [(5120, 2880), (2880, 4096), (2888, 2048), (8, 128), (1024, 5120)]
MULTIPROCESSORS = (132, 114, 78)
"""Of an H100 SXM or an H200, an H100 PCIe, an H20."""


@pytest.mark.parametrize("sms", MULTIPROCESSORS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_clusters_have_all_rows_and_fit(shape: tuple[int, int], sms: int) -> None:
    made = plan(*shape, sms)
    assert made.grid % CLUSTER == 0
    assert made.grid <= sms
    assert (made.grid // CLUSTER - 1) * made.rows < shape[0] <= made.grid // CLUSTER * made.rows
    assert made.rows % 8 == 0, "wgmma's N, and pairs of sums in each block of a cluster"
    assert made.shared_bytes <= SHARED_LIMIT


def test_shapes_without_a_plan_say_why() -> None:
    assert unsupported(5120, 2890, 132) == "2890 columns are not a multiple of 64 from 128 on"
    assert unsupported(5120, 64, 132) == "64 columns are not a multiple of 64 from 128 on"
    assert unsupported(5124, 2880, 132) == "5124 rows are not a multiple of 8 up to 12672"
    assert unsupported(12680, 2880, 132) == "12680 rows are not a multiple of 8 up to 12672"
    assert unsupported(5120, 6656, 132) == "the activations of 6656 columns leave no memory for weights"
    with pytest.raises(ValueError, match="2890 columns"):
        plan(5120, 2890, 132)


def test_arguments_lie_on_the_host_as_on_the_device() -> None:
    assert declared(product_many.SOURCE) == product_many.Args._fields_


@pytest.mark.parametrize("made", [plan(*shape, 132) for shape in SHAPES[:3]], ids=str)
def test_it_compiles(made: ProductPlan) -> None:
    options = [f"-D{key}={value}" for key, value in sorted(made.macros.items())]
    assert compiled(nvrtc.source(product_many.SOURCE), "sm_90a", options)
