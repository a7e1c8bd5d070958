"""Risks of the products that need no GPU: rows without an owner, too much shared memory, a ring too short,
arguments that differ between host and device, source that does not compile."""

from __future__ import annotations

import pytest
import torch

from tests.engine.kernels.cubins import compiled
from vllm_gptoss.engine.kernels import cache, nvrtc, product_many
from vllm_gptoss.engine.kernels.dense import SHARED_LIMIT
from vllm_gptoss.engine.kernels.product_many import CLUSTER, ProductPlan, plan, unsupported

SHAPES = [(5120, 2880), (2880, 4096), (2888, 2048), (8, 128), (1024, 5120)]
ROTATED = [(5120, 2880), (2560, 2880), (1280, 2880), (640, 2880), (7424, 2048), (192, 128)]
"""q/k/v of a rank at TP 1, 2, 4, 8, and others."""
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


@pytest.mark.parametrize("sms", MULTIPROCESSORS)
@pytest.mark.parametrize("shape", ROTATED, ids=str)
def test_blocks_of_a_rotated_product_finish_whole_units(shape: tuple[int, int], sms: int) -> None:
    made, plain = plan(*shape, sms, True), plan(*shape, sms)
    assert made.rows % (8 * CLUSTER) == 0
    assert plain.rows <= made.rows < plain.rows + 8 * CLUSTER
    assert (made.grid // CLUSTER - 1) * made.rows < shape[0] <= made.grid // CLUSTER * made.rows
    assert made.grid <= sms
    assert made.shared_bytes <= SHARED_LIMIT
    assert (made.macros["ROPE"], plain.macros["ROPE"]) == (1, 0)


def test_rows_of_the_20b_are_whole_units_anyway() -> None:
    assert (plan(5120, 2880, 132, True).rows, plan(5120, 2880, 132).rows) == (80, 80)
    assert (plan(2560, 2880, 132, True).rows, plan(2560, 2880, 132).rows) == (48, 40)


def test_a_product_that_is_no_whole_heads_is_not_rotated() -> None:
    assert unsupported(2888, 2048, 132, True) == "2888 rows are not a multiple of 64 up to 12672"
    assert unsupported(12736, 2048, 132, True) == "12736 rows are not a multiple of 64 up to 12672"
    assert unsupported(5120, 2890, 132, True) == "2890 columns are not a multiple of 64 from 128 on"
    with pytest.raises(ValueError, match="2888 rows"):
        plan(2888, 2048, 132, True)


@pytest.mark.parametrize(("qkv", "out"), [((5120, 2880), (2880, 4096)), ((5128, 2880), (2880, 4096))])
def test_a_layer_without_one_of_its_kernels_loads_none(
    qkv: tuple[int, int], out: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_many, "multiprocessors", lambda device: 132)
    weights = [torch.empty(shape, device="meta") for shape in (qkv, out)]
    plans = [made for _, _, made in product_many.loads(*weights)]
    assert product_many.fits(*weights) == (qkv[0] % 64 == 0)
    assert plans == ([plan(*qkv, 132, True), plan(*out, 132)] if product_many.fits(*weights) else [])


def test_only_the_product_that_writes_the_cache_depends_on_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that a step launches but nothing has loaded would be compiled while a graph is captured."""
    monkeypatch.setattr(product_many, "multiprocessors", lambda device: 132)
    weights = [torch.empty(shape, device="meta") for shape in ((5120, 2880), (2880, 4096))]
    plans = [made for _, _, made in product_many.loads(*weights, cache.E4M3)]
    assert plans == [plan(5120, 2880, 132, True, cache.E4M3), plan(2880, 4096, 132)]


def test_shapes_without_a_plan_say_why() -> None:
    assert unsupported(5120, 2890, 132) == "2890 columns are not a multiple of 64 from 128 on"
    assert unsupported(5120, 64, 132) == "64 columns are not a multiple of 64 from 128 on"
    assert unsupported(5124, 2880, 132) == "5124 rows are not a multiple of 8 up to 12672"
    assert unsupported(12680, 2880, 132) == "12680 rows are not a multiple of 8 up to 12672"
    assert unsupported(5120, 128, 132) == "the sums of 80 rows do not fit where 128 columns of activations were"
    assert unsupported(5120, 6656, 132) == "the activations of 6656 columns leave no memory for weights"
    with pytest.raises(ValueError, match="2890 columns"):
        plan(5120, 2890, 132)


@pytest.mark.parametrize(
    "made",
    [
        *(plan(*shape, 132) for shape in SHAPES[:3]),
        *(plan(*shape, 132, True, element) for shape in ROTATED for element in (cache.BF16, cache.E4M3)),
    ],
    ids=str,
)
def test_it_compiles(made: ProductPlan) -> None:
    options = [f"-D{key}={value}" for key, value in sorted(made.macros.items())]
    assert compiled(nvrtc.source(product_many.SOURCE), "sm_90a", options)
