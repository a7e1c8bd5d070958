"""Runs a real `vllm serve` of the small model: for `make demo` and for the end-to-end tests."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.served import tail

NAME = "gpt-oss"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
}

ARGUMENTS = ("--served-model-name", NAME, "--max-model-len", "16384", "--max-num-seqs", "64")

CPU = (
    *("--enforce-eager", "--kv-cache-memory-bytes", str(2**28)),
    *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
)
GPU = (
    *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**31)),
    *("--max-cudagraph-capture-size", "64"),
)
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", **KEEP_MEMORY}
"""Further environment variables of a server. On a CPU the engine's process runs the model, as it does on one GPU: the
worker that vLLM starts there spins for a second after each step. Such a server is spared the function that vLLM
compiles for the first request with logprobs, however eager it is (9 s of processor), and most of its cache, which is
zeroed first. What a step allocates is reused by the next: of a step's time a quarter was the kernel's, for the pages of
logits over 201,088 tokens. On a GPU other servers may run, and few graphs are captured soon."""


class ServerError(RuntimeError):
    """`vllm serve` ended, or did not become healthy in time; the message has the first error and the end of its log."""


@dataclass(frozen=True)
class Server:
    """A running server: `url` without a path, the log it writes, and its process."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def api(self) -> str:
        """`base_url` for the `openai` client."""
        return f"{self.url}/v1"


def reserved(port: int = 0) -> socket.socket:
    """A socket on `port`, or on a port that the system gives to no other process while the socket is open. It does not
    listen, so that a server that sets SO_REUSEADDR, as vLLM's and uvicorn's do, can bind that port too; one only looked
    up may be taken before.

    Raises:
        ServerError: another server listens on `port`, or it may not be bound.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(("127.0.0.1", port))
    except OSError as error:
        held.close()
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise ServerError(f"Port {port} {why}. Choose another one, for example `make serve PORT=8123`.") from None
    return held


def on_gpu() -> bool:
    """Whether there is an NVIDIA GPU and a torch that can use it, without importing torch, which takes seconds."""
    return any(Path("/dev").glob("nvidia[0-9]*")) and not importlib.metadata.version("torch").endswith("+cpu")


def command(model: Path, port: int, base_arguments: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """`vllm serve` on this device. Where vLLM is on a separate path and has no script, its module is run."""
    script = Path(sys.executable).with_name("vllm")
    vllm = [str(script)] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    where = ["--host", "127.0.0.1", "--port", str(port)]
    return [*vllm, "serve", str(model), *where, *base_arguments, *(GPU if on_gpu() else CPU), *arguments]


@contextlib.contextmanager
def serve(
    model: Path,
    log: Path,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
    timeout: float = 400,
    progress: Callable[[float], None] = lambda seconds: None,
    base_arguments: Sequence[str] = ARGUMENTS,
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
) -> Iterator[Server]:
    """Starts `vllm serve`, waits until it is healthy, and stops its whole process group in the end. popen: how.

    Raises:
        ServerError: the port is in use, or the server did not become healthy.
    """
    with reserved(port or 0) as held:
        port = int(held.getsockname()[1])
        with log.open("wb") as out:
            process = popen(
                command(model, port, base_arguments, arguments),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT, **({} if on_gpu() else CPU_ENVIRONMENT), **(environment or {})},
                start_new_session=True,
            )
        server = Server(f"http://127.0.0.1:{port}", log, process)
        try:
            _wait(server, timeout, progress)
            yield server
        finally:
            stop(process)


def _wait(server: Server, timeout: float, progress: Callable[[float], None]) -> None:
    began = time.monotonic()
    while (passed := time.monotonic() - began) < timeout:
        if server.process.poll() is not None:
            raise ServerError(f"vllm serve ended with {server.process.returncode}\n{tail(server.log)}")
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        progress(passed)
        time.sleep(0.5)
    raise ServerError(f"vllm serve was not healthy after {timeout:.0f} s\n{tail(server.log)}")


def stop(process: subprocess.Popen[bytes], patience: float = 20) -> None:
    """Ends the server with SIGTERM, then the rest of its process group with SIGKILL."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
