"""A kernel's source and what it includes, as one text: what a change must reach, what a message must name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.kernels.structs import declared
from vllm_gptoss.engine.kernels import (
    attention,
    attention_many,
    dense,
    experts,
    norm_rope_router,
    nvrtc,
    product_many,
    step,
)


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "types.cuh").write_text("typedef int number;\n")
    (tmp_path / "parts" / "twice.cuh").write_text(
        '#include "types.cuh"\n__device__ number twice(number n) { return 2 * n; }\n'
    )
    (tmp_path / "kernel.cu").write_text(
        '#include "parts/types.cuh"\n#include "parts/twice.cuh"\n'
        'extern "C" __global__ void fill(number* p) { *p = twice(N); }\n'
    )
    return tmp_path / "kernel.cu"


def test_headers_include_headers_and_each_is_there_once(kernel: Path) -> None:
    assert nvrtc.source(kernel).count("typedef") == 1
    assert b"fill" in nvrtc.compile_cubin(nvrtc.source(kernel), "sm_90", ["-DN=1"])


def test_a_change_of_an_inner_header_is_a_change_of_the_source(kernel: Path) -> None:
    before = nvrtc.source(kernel)
    (kernel.parent / "parts" / "types.cuh").write_text("typedef unsigned number;\n")
    assert nvrtc.source(kernel) != before


def test_a_message_names_the_file_and_line_that_it_is_about(kernel: Path) -> None:
    with pytest.raises(nvrtc.NvrtcError, match=r"kernel\.cu\(3\).*\"N\" is undefined"):
        nvrtc.compile_cubin(nvrtc.source(kernel), "sm_90")
    (kernel.parent / "parts" / "twice.cuh").write_text('#include "types.cuh"\n\nnothing\n')
    with pytest.raises(nvrtc.NvrtcError, match=r"twice\.cuh\(3\)"):
        nvrtc.compile_cubin(nvrtc.source(kernel), "sm_90", ["-DN=1"])


@pytest.mark.parametrize(
    "module", [attention, attention_many, dense, experts, step], ids=lambda module: module.__name__
)
def test_nothing_of_a_kernel_is_left_to_an_include_path(module: object) -> None:
    assert "#include" not in nvrtc.source(module.SOURCE)  # type: ignore[attr-defined]


ARGUMENTS = {
    dense.SOURCE: dense.DenseArgs,
    attention.SOURCE: attention.AttentionArgs,
    product_many.SOURCE: product_many.ProductArgs,
    norm_rope_router.CUDA / "norm_many.cu": norm_rope_router.NormArgs,
    norm_rope_router.CUDA / "rope_many.cu": norm_rope_router.RopeArgs,
    norm_rope_router.CUDA / "route_many.cu": norm_rope_router.RouteArgs,
}


@pytest.mark.parametrize("source", ARGUMENTS, ids=lambda source: source.stem)
def test_arguments_lie_on_the_host_as_on_the_device(source: Path) -> None:
    assert declared(source) == ARGUMENTS[source]._fields_
