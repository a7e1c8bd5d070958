"""Kernels are loaded and queried from threads without a CUDA context, as at the start of an engine."""

from __future__ import annotations

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.gpu.marks import SM90
from vllm_gptoss.engine.kernels import nvrtc

pytestmark = SM90

SOURCE = Path(__file__).parent / "fill.cu"


@functools.cache
def fill(device: int, value: int) -> nvrtc.Kernel:
    return nvrtc.load(device, SOURCE, "sm_90", {"VALUE": value}).kernel("fill", 0)


@pytest.fixture(params=[0, 1], ids=["first GPU", "second GPU"])
def device(request: pytest.FixtureRequest) -> int:
    if request.param >= torch.cuda.device_count():
        pytest.skip("needs a second GPU")
    torch.empty(1, device=f"cuda:{request.param}")  # threads take this memory again, without a call of the runtime
    fill.cache_clear()
    return int(request.param)


def filled(device: int, value: int) -> list[int]:
    with torch.cuda.device(device):
        out = torch.zeros(4, dtype=torch.int32, device="cuda")
        fill(device, value)(1, 4, [ctypes.c_void_p(out.data_ptr())], dependent=False)
        return out.tolist()


def test_what_threads_loaded_runs_on_its_gpu(device: int) -> None:
    nvrtc.at_once((fill, device, value) for value in (3, 4, 3, 5))
    assert fill.cache_info().currsize == 3
    assert [filled(device, value) for value in (3, 4, 5)] == [[3] * 4, [4] * 4, [5] * 4]


def test_a_thread_asks_of_a_kernel_that_another_loaded(device: int) -> None:
    kernel = fill(device, 6)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(kernel.blocks_per_multiprocessor, 1024, 0).result() == 2


def test_loading_leaves_the_current_gpu(device: int) -> None:
    before = torch.cuda.current_device()
    fill(device, 7)
    assert torch.cuda.current_device() == before
    assert torch.zeros(1, device="cuda").device.index == before
