"""Buffers of several ranks that find each other, and ranks that fail together. Threads are ranks, bytes are memory.

`tests/gpu/test_all_reduce.py` runs the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.kernels.cubins import compiled, judged
from vllm_gptoss.engine.kernels import all_reduce, nvrtc
from vllm_gptoss.fallback import UnavailableError

COLUMNS = 8


class Driver:
    """What `all_reduce` calls of the driver, for ranks that are threads. faults: of (rank, function), its status."""

    def __init__(self, faults: dict[tuple[int, str], int]) -> None:
        self.faults, self.here = faults, threading.local()
        self.lock = threading.Lock()
        self.buffers: dict[int, bytearray] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        status = self.faults.get((self.here.rank, name), 0)
        if status < 0:
            raise AttributeError(f"no {name} in the driver")
        do = vars(Driver).get(f"on_{name}", lambda *_: None)
        return lambda *arguments: status or do(self, *arguments) or 0

    def memory(self, address: int) -> tuple[bytearray, int]:
        base = max(each for each in self.buffers if each <= address)
        return self.buffers[base], address - base

    def on_cuMemAlloc_v2(self, base: Any, size: Any) -> None:
        with self.lock:
            base._obj.value = (1 + len(self.buffers)) << 32
            self.buffers[base._obj.value] = bytearray(b"?") * size.value

    def on_cuMemsetD8_v2(self, base: Any, value: int, size: Any) -> None:
        self.buffers[base.value][:] = bytes([value]) * size.value

    def on_cuMemsetD32_v2(self, at: Any, value: Any, count: Any) -> None:
        buffer, offset = self.memory(at.value)
        if (self.here.rank, "lost") not in self.faults:
            buffer[offset : offset + 4 * count.value] = value.value.to_bytes(4, "little") * count.value

    def on_cuIpcGetMemHandle(self, handle: Any, base: Any) -> None:
        ctypes.memmove(handle, base.value.to_bytes(8, "little"), 8)

    def on_cuIpcOpenMemHandle_v2(self, base: Any, handle: Any, flags: int) -> None:
        base._obj.value = int.from_bytes(bytes(handle)[:8], "little")

    def on_cuMemcpyDtoH_v2(self, to: Any, at: Any, size: Any) -> None:
        buffer, offset = self.memory(at.value)
        ctypes.memmove(to, bytes(buffer[offset : offset + size.value]), size.value)

    def on_cuGetErrorName(self, status: int, name: Any) -> None:
        name._obj.value = b"CUDA_ERROR"


def connected(
    monkeypatch: pytest.MonkeyPatch, ranks: int, faults: dict[tuple[int, str], int], columns: int = COLUMNS
) -> tuple[Driver, list[Any]]:
    """Of each rank its `PushAllReduce`, or why it has none."""
    driver, barrier, said = Driver(faults), threading.Barrier(ranks, timeout=20), [None] * ranks
    host = SimpleNamespace(exists=lambda: True, read_text=lambda: str(faults.get((driver.here.rank, "host"), 0)))
    monkeypatch.setattr(nvrtc, "driver", lambda: driver)
    monkeypatch.setattr(nvrtc, "current", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(all_reduce, "kernel", lambda device, ranks: None)
    monkeypatch.setattr(all_reduce, "BOOT_ID", host)

    def one(rank: int) -> Any:
        driver.here.rank = rank

        def gather(item: Any) -> list[Any]:
            said[rank] = item
            barrier.wait()
            everything = list(said)
            barrier.wait()
            return everything

        try:
            return all_reduce.connect(rank, rank, ranks, columns, gather)
        except UnavailableError as error:
            return str(error)

    with ThreadPoolExecutor(ranks) as threads:
        return driver, list(threads.map(one, range(ranks)))


@pytest.mark.parametrize("ranks", sorted(all_reduce.MOST_TOKENS))
def test_each_rank_receives_every_other_in_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    driver, reduces = connected(monkeypatch, ranks, {})
    for reduce in reduces:
        assert reduce.fits(all_reduce.MOST_TOKENS[ranks])
        assert not reduce.fits(all_reduce.MOST_TOKENS[ranks] + 1)
        for generation in range(all_reduce.GENERATIONS):
            sends = bytes([1 + reduce.rank, generation]) * (reduce.region // 2)
            for target in reduce.targets[generation][: ranks - 1]:
                buffer, offset = driver.memory(target)
                assert buffer[offset : offset + len(sends)] == b"\xff" * len(sends), "not yet written, by anybody"
                buffer[offset : offset + len(sends)] = sends
    for reduce in reduces:
        for generation in range(all_reduce.GENERATIONS):
            for sender in set(range(ranks)) - {reduce.rank}:
                buffer, offset = driver.memory(reduce.bases[reduce.rank] + reduce.offset(generation, sender))
                assert buffer[offset : offset + reduce.region] == bytes([1 + sender, generation]) * (reduce.region // 2)


@pytest.mark.parametrize(
    ("fault", "status", "why"),
    [
        ("cuMemAlloc_v2", 2, "rank 1: cuMemAlloc: CUDA_ERROR"),
        ("cuIpcGetMemHandle", 801, "rank 1: cuIpcGetMemHandle: CUDA_ERROR"),
        ("cuIpcGetMemHandle", -1, "rank 1: no cuIpcGetMemHandle in the driver"),
        ("cuIpcOpenMemHandle_v2", 217, "rank 1: the memory of rank 0 cannot be mapped: CUDA_ERROR"),
        ("cuMemsetD32_v2", 1, "rank 1: the memory of rank 0 cannot be written: CUDA_ERROR"),
        ("lost", 1, "rank 0: what a peer wrote did not arrive"),
        ("host", 1, "rank 1 is on another host"),
    ],
)
def test_what_one_rank_lacks_all_ranks_do_without(
    monkeypatch: pytest.MonkeyPatch, fault: str, status: int, why: str
) -> None:
    assert connected(monkeypatch, 2, {(1, fault): status})[1] == [why] * 2


@pytest.mark.parametrize(("ranks", "columns"), [(3, COLUMNS), (2, COLUMNS + 4)])
def test_other_sizes_have_no_kernel(monkeypatch: pytest.MonkeyPatch, ranks: int, columns: int) -> None:
    why = f"no kernel for {ranks} ranks and rows of {columns}"
    assert connected(monkeypatch, ranks, {}, columns)[1] == [why] * ranks


@pytest.mark.parametrize("ranks", sorted(all_reduce.MOST_TOKENS))
def test_the_kernel_compiles_and_reads_the_arguments_that_are_written(ranks: int) -> None:
    macros = [f"-DRANKS={ranks}", f"-DPATIENCE={all_reduce.PATIENCE_S}000000000ull"]
    source = nvrtc.source(all_reduce.SOURCE)
    assert b"all_reduce" in compiled(source, "sm_90", macros)
    body = re.search(r"struct Args \{(.*?)\};", all_reduce.SOURCE.read_text(), re.DOTALL)
    assert body is not None
    names = re.findall(r"(\w+)(?:\[\d+\])?[,;]", re.sub(r"//.*", "", body[1]))
    assert names == [name for name, *_ in all_reduce.Args._fields_]
    for name in names:
        source += f"static_assert(sizeof(((Args*)0)->{name}) == {getattr(all_reduce.Args, name).size});\n"
    judged(source + f"static_assert(sizeof(Args) == {ctypes.sizeof(all_reduce.Args)});\n", "sm_90", macros)
