"""CUDA C++ compiled at first use: NVRTC compiles to a cubin, which is cached on disk and launched through the driver.

Only `ctypes` over the libnvrtc that torch ships and the driver's libcuda: no nvcc, no headers, no further package.
A cubin is keyed by source, options, architecture and NVRTC version. A cache that cannot be read or written costs the
compilation (0.2 to 1.5 s a kernel) and one log line, never the start.

Covered: sm80 and later, launches on torch's current stream, CUDA graph capture, programmatic dependent launch.
Not covered: textures, cooperative launches, clusters, linking of several sources.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import hashlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

PROGRAMMATIC_STREAM_SERIALIZATION = 6
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
MPS_ENABLED = 133
"""`CU_DEVICE_ATTRIBUTE_MPS_ENABLED` of cuda.h (CUDA 12.8)."""


class NvrtcError(RuntimeError):
    """Compilation or a driver call failed; the message holds the compiler's log or the driver's error name."""


def cache_directory() -> Path:
    """The cache of cubins: `$GPTOSS_CACHE`, else `vllm-gptoss` in the user's cache directory."""
    if own := os.environ.get("GPTOSS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-gptoss"


@functools.cache
def library() -> ctypes.CDLL:
    """libnvrtc: the loader's own, else the one in a `nvidia-cuda-nvrtc` package.

    Raises:
        NvrtcError: there is none.
    """
    patterns = ("nvidia/cu1*/lib/libnvrtc.so.*", "nvidia/cuda_nvrtc/lib/libnvrtc.so.*")
    packaged = [path for root in sys.path for pattern in patterns for path in sorted(glob.glob(f"{root}/{pattern}"))]
    for name in [*packaged, "libnvrtc.so.13", "libnvrtc.so.12"]:
        try:
            # libnvrtc opens its builtins by bare name at the first compilation: found if already in the process.
            for builtins in glob.glob(os.path.join(os.path.dirname(name), "libnvrtc-builtins.so.*")):
                ctypes.CDLL(builtins)
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise NvrtcError("libnvrtc was not found: install the package nvidia-cuda-nvrtc of your CUDA version")


@functools.cache
def version() -> tuple[int, int]:
    """NVRTC's (major, minor)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def source(path: Path) -> str:
    """A kernel's source with what it includes, each header once, as one text: the cache's key is then all of it.

    Includes are searched in the folder of the including file. Compiler messages name the file and line they are about.
    """
    seen = {path.resolve()}

    def text(file: Path) -> str:
        def included(line: re.Match[str]) -> str:
            header = (file.parent / line[1]).resolve()
            if header in seen:
                return "\n"
            seen.add(header)
            following = line.string.count("\n", 0, line.end()) + 1
            return f'#line 1 "{header.name}"\n{text(header)}#line {following} "{file.name}"\n'

        return re.sub(r'^#include "(.+)"\n', included, file.read_text(), flags=re.MULTILINE)

    return text(path)


def shared_limit(arch: str) -> int:
    """Bytes of shared memory of a block, by the number in `arch`; a multiprocessor has 1 KiB more."""
    return {"80": 163, "87": 163, "90": 227}.get(re.sub(r"\D", "", arch), 99) << 10


def target(device: int, arch: str) -> str:
    """`load`'s `arch` for a GPU. arch: `Device.arch`; PTX if a test setting gave the GPU that of another."""
    import torch

    native = torch.cuda.get_device_capability(device) == divmod(int(arch[2:]), 10)
    return f"{'sm' if native else 'compute'}_{arch[2:]}"


def compile_cubin(source: str, arch: str, options: Sequence[str] = ()) -> bytes:
    """Compiles CUDA C++ to machine code. Needs no GPU.

    source: one self-contained file; arch: `sm_90`, `sm_90a`, …, or `compute_80`, … for PTX, which the driver compiles
    when it loads it; options: NVRTC options such as `-DN=8`.

    Raises:
        NvrtcError: with the compiler's log.
    """
    nvrtc, program = library(), ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    if status:
        raise NvrtcError(f"nvrtcCreateProgram failed with {status}")
    try:
        arguments = [f"--gpu-architecture={arch}", "--std=c++17", "--use_fast_math", *options]
        array = (ctypes.c_char_p * len(arguments))(*[argument.encode() for argument in arguments])
        if status := nvrtc.nvrtcCompileProgram(program, len(arguments), array):
            raise NvrtcError(f"NVRTC {version()} failed with {status}:\n{_log(program)}")
        if "Potential Performance Loss" in (said := _log(program)):  # ptxas serialises wgmma: C7510 and the following
            logger.warning("NVRTC %s makes a kernel slower than it was measured: %s", version(), said.strip())
        size, kind = ctypes.c_size_t(), "PTX" if arch.startswith("compute") else "CUBIN"
        nvrtc[f"nvrtcGet{kind}Size"](program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        nvrtc[f"nvrtcGet{kind}"](program, image)
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _log(program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    library().nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library().nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")


def cubin(source: str, arch: str, options: Sequence[str] = ()) -> bytes:
    """`compile_cubin` through the disk cache."""
    identity = "\0".join([source, arch, *options, str(version())])
    path = cache_directory() / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.cubin"
    try:
        if image := _verified(path.read_bytes()):
            return image
        logger.warning("compiling again: the cached kernel %s is damaged", path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("compiling again: the kernel cache %s cannot be read: %s", path.parent, error)
    image = compile_cubin(source, arch, options)
    _store(path, image)
    return image


def _verified(entry: bytes) -> bytes | None:
    digest, image = entry[:32], entry[32:]
    return image if image and hashlib.sha256(image).digest() == digest else None


def _store(path: Path, image: bytes) -> None:
    """Writes a temporary file and renames it: another process sees a complete entry or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(image).digest() + image)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:
        logger.warning("compiled kernels are not stored: %s cannot be written: %s", path.parent, error)


class _Attribute(ctypes.Structure):
    # CUlaunchAttribute: an id, padding to 8, a union of 64 bytes.
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_char * 64))


class _Config(ctypes.Structure):
    # CUlaunchConfig.
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver.

    Raises:
        OSError: there is none.
    """
    return ctypes.CDLL("libcuda.so.1")


def check(status: int, what: str) -> None:
    """Raises NvrtcError with the name of the driver's error, unless the code is success."""
    if status:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(status, ctypes.byref(name))
        raise NvrtcError(f"{what}: {(name.value or b'unknown').decode()}")


def shared_by_mps(device: int) -> bool:
    """Whether CUDA's Multi-Process Service is on, which runs kernels of several processes concurrently.

    Two kernels with grid-wide barriers would then deadlock if each occupies half of the GPU. Without the service,
    processes use the whole GPU in turn. False without a driver or if the driver lacks the query.
    """
    value = ctypes.c_int()
    try:
        cuda = driver()
    except OSError:
        return False
    return not cuda.cuDeviceGetAttribute(ctypes.byref(value), MPS_ENABLED, device) and bool(value.value)


class Kernel:
    """One `extern "C"` kernel of a loaded cubin."""

    def __init__(self, module: Module, name: str, shared_bytes: int) -> None:
        self.name, self.shared_bytes = name, shared_bytes
        self._module = module
        self._function = ctypes.c_void_p()
        check(driver().cuModuleGetFunction(ctypes.byref(self._function), module.handle, name.encode()), f"no {name}")
        check(
            driver().cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
            f"{name} with {shared_bytes} bytes of shared memory",
        )
        attribute = _Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value = (1).to_bytes(4, sys.byteorder)
        self._attribute = attribute

    def blocks_per_multiprocessor(self, threads: int, shared_bytes: int) -> int:
        """How many blocks of this size one multiprocessor holds at once."""
        count = ctypes.c_int()
        asked = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor
        with current(self._module.device):
            check(asked(ctypes.byref(count), self._function, threads, ctypes.c_size_t(shared_bytes)), self.name)
        return count.value

    def __call__(
        self,
        grid: int,
        threads: int,
        arguments: Sequence[ctypes._SimpleCData[int] | ctypes._SimpleCData[float] | ctypes.Structure],
        shared_bytes: int | None = None,
        *,
        dependent: bool = True,
    ) -> None:
        """Launches `grid` x `threads` on torch's current stream of the module's device.

        dependent: may start before the previous kernel of the stream ends (programmatic dependent launch); the kernel
        must then call `griddepcontrol.wait` before it touches what that one wrote or reads.
        """
        import torch

        addresses = [ctypes.addressof(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        config = _Config(
            grid=(grid, 1, 1),
            block=(threads, 1, 1),
            shared=self.shared_bytes if shared_bytes is None else shared_bytes,
            stream=torch.cuda.current_stream(self._module.device).cuda_stream,
            attributes=ctypes.pointer(self._attribute),
            count=1 if dependent else 0,
        )
        check(driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None), self.name)


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """The context that the CUDA runtime, and so torch, uses on a device."""
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
    check(driver().cuDeviceGet(ctypes.byref(ordinal), device), f"cuDeviceGet {device}")
    check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal), "cuDevicePrimaryCtxRetain")
    return context


@contextlib.contextmanager
def current(device: int) -> Iterator[None]:
    """Makes a device's context current: a new thread has none, also if torch has a current device there."""
    check(driver().cuCtxPushCurrent_v2(_primary_context(device)), "cuCtxPushCurrent")
    try:
        yield
    finally:
        check(driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())), "cuCtxPopCurrent")


class Module:
    """A cubin loaded on a device; any thread may use it."""

    def __init__(self, image: bytes, device: int) -> None:
        import torch

        torch.cuda.init()
        self.device, self.handle = device, ctypes.c_void_p()
        with current(device):
            check(driver().cuModuleLoadData(ctypes.byref(self.handle), image), "cuModuleLoadData")

    def kernel(self, name: str, shared_bytes: int) -> Kernel:
        """The kernel `name`, allowed `shared_bytes` of dynamic shared memory."""
        with current(self.device):
            return Kernel(self, name, shared_bytes)


def load(device: int, path: Path, arch: str, defines: Mapping[str, int | str], options: Sequence[str] = ()) -> Module:
    """Compiles the source at `path` with `-DNAME=value` for each define, through the cache, and loads it on a device.

    Raises:
        NvrtcError: the compiler or the driver refused.
    """
    options = [*(f"-D{name}={value}" for name, value in sorted(defines.items())), *options]
    return Module(cubin(source(path), arch, options), device)


def at_once(loads: Iterable[tuple[Callable[..., object], *tuple[Hashable, ...]]]) -> None:
    """Makes calls that compile and load, each different one on a thread: NVRTC works outside the interpreter's lock.

    loads: a function and its arguments.

    Raises:
        NvrtcError: what the first of them raised, once all have ended.
    """
    with ThreadPoolExecutor() as threads:
        for load in [threads.submit(*load) for load in dict.fromkeys(loads)]:
            load.result()
