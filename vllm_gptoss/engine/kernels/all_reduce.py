"""Sum over the tensor-parallel ranks of one host, by push: host side of `cuda/all_reduce.cu`.

Each rank allocates one buffer and maps those of its peers (CUDA IPC). A call stores the rank's addend into every peer's
buffer and polls its own, so it needs no barrier. All ranks compute the same bits. A process that waits longer than
`PATIENCE_S` for a peer ends with a message on stderr.

Covered: ranks of one host whose GPUs reach each other's memory; CUDA graphs; programmatic dependent launch.
Not covered: NVLink multicast; calls on two streams at once; several hosts.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_gptoss.engine.kernels import nvrtc
from vllm_gptoss.fallback import UnavailableError

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).parent / "cuda" / "all_reduce.cu"
MOST_TOKENS: Final = {2: 512, 4: 64, 8: 32}
"""Rows of the largest call, by ranks. Each rank sends all rows to each peer, so more ranks send fewer rows."""
GENERATIONS: Final = 2
PATIENCE_S: Final = 300
"""As long as vLLM waits for a step (`VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`)."""
THREADS: Final = 128
PIECE: Final = 8
"""Values of a thread, 16 bytes."""
GRANULE: Final = 2 << 20
"""CUDA maps memory of other processes in units of 2 MiB."""
EMPTY: Final = 0xFFFFFFFF
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LAZY_ENABLE_PEER_ACCESS: Final = 1

Gather = Callable[[Any], list[Any]]
"""One object of each rank, in the order of the ranks. A collective."""


class Args(ctypes.Structure):
    """`struct Args` of all_reduce.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "out", "received")),
        ("targets", ctypes.c_ulonglong * 7),
        *((name, ctypes.c_int) for name in ("rank", "pieces", "stride", "unused")),
    ]


class IpcHandle(ctypes.Structure):
    """`CUipcMemHandle`."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


@functools.cache
def kernel(device: int, ranks: int, patience: int = PATIENCE_S) -> nvrtc.Kernel:
    """The kernel for so many ranks, compiled and loaded.

    Raises:
        NvrtcError: the compiler or the driver refused.
    """
    macros = {"RANKS": ranks, "PATIENCE": f"{patience}000000000ull"}
    return nvrtc.load(device, SOURCE, "sm_90", macros).kernel("all_reduce", 0)


class PushAllReduce:
    """The buffers of the ranks, as this one addresses them, and the calls. `connect` makes it."""

    def __init__(self, device: int, rank: int, ranks: int, columns: int, also: int = 0) -> None:
        self.device, self.rank, self.ranks = device, rank, ranks
        self.most = MOST_TOKENS[ranks]
        self.stride = self.most * columns // PIECE
        self.bases: list[int] = []
        self.also = also
        self.kernel = kernel(device, ranks)

    @property
    def region(self) -> int:
        """Bytes that one sender fills in one generation."""
        return self.stride * 16

    def allocate(self) -> int:
        """This rank's buffer, [generations, senders, stride] pieces of 16 bytes and `also` bytes, which are 0."""
        size = -(-(self.offset(GENERATIONS, 0) + self.also) // GRANULE) * GRANULE
        base, cuda = ctypes.c_ulonglong(), nvrtc.driver()
        with nvrtc.current(self.device):
            nvrtc.check(cuda.cuMemAlloc_v2(ctypes.byref(base), ctypes.c_size_t(size)), "cuMemAlloc")
            nvrtc.check(cuda.cuMemsetD8_v2(base, 0, ctypes.c_size_t(size)), "cuMemset")
            nvrtc.check(cuda.cuCtxSynchronize(), "cuMemset")
        return base.value

    def handle(self, base: int) -> bytes:
        """What another process needs to map the buffer."""
        found = IpcHandle()
        with nvrtc.current(self.device):
            asked = nvrtc.driver().cuIpcGetMemHandle(ctypes.byref(found), ctypes.c_ulonglong(base))
            nvrtc.check(asked, "cuIpcGetMemHandle")
        return bytes(found)

    def map(self, own: int, handles: list[bytes]) -> None:
        """Maps the peers' buffers, and marks this rank's regions in them as not yet written."""
        cuda, self.bases = nvrtc.driver(), [own] * self.ranks
        with nvrtc.current(self.device):
            for peer in range(self.ranks):
                base = ctypes.c_ulonglong(own)
                if peer != self.rank:
                    handle = IpcHandle.from_buffer_copy(handles[peer])
                    status = cuda.cuIpcOpenMemHandle_v2(ctypes.byref(base), handle, LAZY_ENABLE_PEER_ACCESS)
                    nvrtc.check(status, f"the memory of rank {peer} cannot be mapped")
                self.bases[peer] = base.value
                for generation in range(GENERATIONS):
                    at = ctypes.c_ulonglong(base.value + self.offset(generation, self.rank))
                    status = cuda.cuMemsetD32_v2(at, ctypes.c_uint(EMPTY), ctypes.c_size_t(self.region // 4))
                    nvrtc.check(status, f"the memory of rank {peer} cannot be written")
            nvrtc.check(cuda.cuCtxSynchronize(), "the memory of a peer cannot be written")

    def offset(self, generation: int, sender: int) -> int:
        """Where a sender's region of a generation starts in a buffer."""
        return (generation * self.ranks + sender) * self.region

    @property
    def others(self) -> list[int]:
        """Where the `also` bytes of each rank are, which this class does not use."""
        return [base + self.offset(GENERATIONS, 0) for base in self.bases]

    def look(self) -> None:
        """Checks that every rank's marks have arrived here: some drivers report peer access that does not work."""
        size = GENERATIONS * self.ranks * self.region
        seen = ctypes.create_string_buffer(size)
        with nvrtc.current(self.device):
            own = ctypes.c_ulonglong(self.bases[self.rank])
            nvrtc.check(nvrtc.driver().cuMemcpyDtoH_v2(seen, own, ctypes.c_size_t(size)), "cuMemcpyDtoH")
        if seen.raw != b"\xff" * size:
            raise nvrtc.NvrtcError("what a peer wrote did not arrive")

    @functools.cached_property
    def targets(self) -> list[ctypes.Array[ctypes.c_ulonglong]]:
        """Of each generation, where the other ranks, from the next on, receive from this one."""
        others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        offsets = [self.offset(generation, self.rank) for generation in range(GENERATIONS)]
        return [(ctypes.c_ulonglong * 7)(*(self.bases[peer] + offset for peer in others)) for offset in offsets]

    def fits(self, tokens: int) -> bool:
        """Whether a call may have so many rows."""
        return tokens <= self.most

    def __call__(self, x: Tensor, generation: int) -> Tensor:
        """The sum over the ranks, in float32, in their order.

        x: [T, C] bf16, row-major, alike on all ranks; generation: a call's is not that of the call before, unless
        another collective is between both.
        """
        import torch

        out, pieces = torch.empty_like(x), x.numel() // PIECE
        args = Args(
            x=x.data_ptr(),
            out=out.data_ptr(),
            received=self.bases[self.rank] + self.offset(generation, 0),
            targets=self.targets[generation],
            rank=self.rank,
            pieces=pieces,
            stride=self.stride,
        )
        self.kernel(-(-pieces // THREADS), THREADS, [args])
        return out


def connect(device: int, rank: int, ranks: int, columns: int, gather: Gather, also: int = 0) -> PushAllReduce:
    """Allocates and maps the buffers of all ranks. A collective.

    columns: C, of a row; also: bytes for another kernel of the ranks, see `others`.

    Raises:
        UnavailableError: on every rank, with the reason of the first that has one.
    """
    if ranks not in MOST_TOKENS or columns % PIECE:
        raise UnavailableError(f"no kernel for {ranks} ranks and rows of {columns}")
    host = BOOT_ID.read_text() if BOOT_ID.exists() else ""

    def everywhere(step: Callable[[], Any]) -> list[Any]:
        try:
            found, why = step(), None
        except Exception as error:  # the other ranks wait for this one's answer
            found, why = None, f"rank {rank}: {error}"
        answers = gather((host, found, why))
        whys = [f"rank {each} is on another host" for each, answer in enumerate(answers) if answer[0] != answers[0][0]]
        if said := next((answer[2] for answer in answers if answer[2]), None) or next(iter(whys), None):
            raise UnavailableError(said)
        return [answer[1] for answer in answers]

    made: list[Any] = []

    def allocate() -> bytes:
        reduce = PushAllReduce(device, rank, ranks, columns, also)
        made.extend((reduce, reduce.allocate()))
        handle: bytes = reduce.handle(made[1])
        return handle

    handles = everywhere(allocate)
    reduce: PushAllReduce = made[0]
    everywhere(lambda: reduce.map(made[1], handles))
    everywhere(reduce.look)
    return reduce
