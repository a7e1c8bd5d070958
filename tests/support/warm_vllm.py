"""Programs that start with vLLM imported: forked from a process that has it, as are their engines and workers.

A `vllm serve` takes some 43 s of processor until it is healthy, three fifths of it for imports in three processes; so
started, about 7. It differs from a user's in nothing after the imports but that its processes fork where they would
spawn; this package is imported after the fork. The start itself is tested with what a user starts
(tests/demo/test_run.py; in `make soak` also `served` and test_api_servers.py).

Run as a program, `python -m tests.support.warm_vllm SOCKET MODEL` is that process. It forks one that waits for every
requested program, and ends it when the requester has exited. MODEL's tokenizer is read once too.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.places import CACHE

PRELOADED = (
    *("tests.support.lazy", "openai", "anthropic", "aiohttp", "opentelemetry.sdk.trace", "xgrammar", "mcp"),
    *("vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server"),
    *("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.engine.async_llm"),
    *("vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.gpt_oss"),
    *("sqlalchemy", "sqlalchemy.dialects.sqlite", "sqlalchemy.dialects.postgresql", "pypdf"),
    *("bs4", "markdown_it", "jsonschema", "loguru", "model_hosting_container_standards.sagemaker"),
)
_kept: list[int | subprocess.Popen[bytes]] = []
"""This worker's end of the pipe, and the process if it was started here."""


class Process:
    """A program, with the part of `subprocess.Popen` that its users need."""

    def __init__(
        self, arguments: Sequence[str], *, stdout: Any, env: Mapping[str, str], stdin: int | None = None, **_: Any
    ) -> None:
        """arguments: a console script and what follows, or `python -m MODULE …`. stdout takes both streams."""
        self.args, self.returncode = list(arguments), None
        reads, self.stdin = os.open(os.devnull, os.O_RDONLY), None
        if stdin == subprocess.PIPE:
            os.close(reads)
            reads, writes = os.pipe()
            self.stdin = os.fdopen(writes, "wb")
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(_socket())
        asked = json.dumps({"arguments": self.args, "environ": dict(env), "cwd": os.getcwd()}).encode()
        socket.send_fds(self._line, [b"%10d" % len(asked)], [reads, stdout.fileno()])
        os.close(reads)
        self._line.sendall(asked)
        self.pid = int(self._line.recv(16))

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._line.recv(16) or -signal.SIGKILL)
            self._line.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def popen(arguments: Sequence[str], **options: Any) -> Any:
    """Such a process; an ordinary one on a GPU, and with coverage, which does not follow a fork."""
    from demo.server import on_gpu

    plain = "COVERAGE_PROCESS_CONFIG" in os.environ or on_gpu()
    return (subprocess.Popen if plain else Process)(arguments, **options)


def run(arguments: Sequence[str], env: Mapping[str, str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Such a process to its end; `stdout` has both streams.

    Raises:
        subprocess.TimeoutExpired: it took more than `limit_s`; it is killed.
    """
    with tempfile.TemporaryFile() as out:
        process = popen(arguments, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        try:
            ended = process.wait(limit_s)
        finally:
            process.kill()
        out.seek(0)
        return subprocess.CompletedProcess(list(arguments), ended, out.read().decode(errors="replace"))


@cache
def _socket() -> str:
    """The socket of the process that all workers of a run share: the first starts it, the last ends it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    folder = Path("/tmp", f"gptoss-warm-{os.getuid()}-{run}")
    folder.mkdir(mode=0o700, exist_ok=True)
    path, held = folder / "socket", folder / "held"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reads = None
        if not path.exists():
            os.mkfifo(held)
            reads = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
        _kept.append(os.open(held, os.O_WRONLY | os.O_NONBLOCK))
        if reads is not None:
            _kept.append(_started(path, reads))
            os.close(reads)
    return str(path)


def _started(path: Path, held: int) -> subprocess.Popen[bytes]:
    from demo.expand import model_dir
    from demo.server import KEEP_MEMORY

    environment = {**os.environ, **KEEP_MEMORY, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "tests.support.warm_vllm", str(path), str(model_dir(CACHE))]
    warm = subprocess.Popen(command, env=environment, stdin=held, stdout=subprocess.PIPE)
    assert warm.stdout
    assert warm.stdout.readline() == b"ready\n"
    return warm


def main(path: str, model: str) -> None:
    """Serves until standard input, a pipe that each worker holds open, has no writer any more."""
    import importlib

    import setproctitle
    import torch

    setproctitle.getproctitle()  # finds the memory of the title, which a fork with another environment cannot
    torch.cpu._init_amx()  # which needs the kernel's permission; forked processes have it
    for name in PRELOADED:
        importlib.import_module(name)
    get_quantization_config = importlib.import_module("vllm.model_executor.layers.quantization").get_quantization_config
    get_quantization_config("mxfp4")  # imports a hundred modules
    read_tokenizer(model)
    replace_kernels()
    widen_head()
    assert "vllm_gptoss" not in sys.modules
    sys.modules["tests.support.warm_vllm"] = sys.modules["__main__"]
    globals()["_socket"] = lambda: path  # what is forked may ask for more
    gc.freeze()  # vLLM collects seven times in an engine's life: 1.9 s over what is imported here
    gc.unfreeze = lambda: None  # which vLLM calls before the last two of them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            line, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _wait_for(line)
            line.close()
    shutil.rmtree(Path(path).parent)


def replace_kernels() -> None:
    """Replaces vLLM's Triton kernels by those for CPUs: each worker would search the attributes of all modules."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)  # type: ignore[method-assign]


def widen_head() -> None:
    """Multiplies by vLLM's LM head in float32, rounded to bfloat16: 8 rows of logits in 20 ms instead of 90.

    Without AMX or AVX-512, torch's product of bfloat16 takes about 11 ms a row. Both add in float32.
    """
    import torch
    from vllm.model_executor.layers import utils

    if torch.cpu._is_avx512_supported():
        return
    dispatch = utils.dispatch_cpu_unquantized_gemm

    def dispatched(layer: Any, remove_weight: bool) -> None:
        dispatch(layer, remove_weight)
        if remove_weight:  # any other layer
            return
        narrow, wide = layer.cpu_linear, dict[tuple[int, int], torch.Tensor]()

        def product(rows: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
            if len(rows) < 2 or bias is not None:
                return narrow(rows, weight, bias)
            key = weight.data_ptr(), weight._version
            if key not in wide:
                wide.clear()
                wide[key] = weight.float()
            return torch.nn.functional.linear(rows.float(), wide[key]).to(rows.dtype)

        layer.cpu_linear = product

    utils.dispatch_cpu_unquantized_gemm = dispatched


def read_tokenizer(model: str) -> None:
    """Reads `model`'s tokenizer twice, as vLLM does (the second time for a chat template), and copies it for the pool
    of vLLM's renderer: 12 s of processor in each start. vLLM caches what is read, but not the copies.
    """
    from transformers import ProcessorMixin, PythonBackend, TokenizersBackend
    from vllm.tokenizers.registry import cached_get_tokenizer
    from vllm.transformers_utils.processor import cached_get_processor

    options = {"runner_type": "generate", "tokenizer_mode": "auto", "revision": None, "trust_remote_code": False}
    tokenizer: Any = cached_get_tokenizer(model, **options)  # imports of the server
    kinds: Any = (PythonBackend, TokenizersBackend, ProcessorMixin)
    revisions: dict[str, Any] = {"revision": None, "code_revision": None}
    cached_get_processor(tokenizer.name_or_path, processor_cls=kinds, **revisions, trust_remote_code=False)
    prepared = [copy.deepcopy(tokenizer) for _ in range(2)]
    cached = type(tokenizer)

    def shallow(self: Any) -> Any:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def deep(self: Any, memo: dict[int, Any]) -> Any:
        if prepared and type(self) is cached:
            return prepared.pop()
        make, arguments, *_ = self.__reduce__()
        return make(*copy.deepcopy(arguments, memo))

    cached.__copy__, cached.__deepcopy__ = shallow, deep


def _wait_for(line: socket.socket) -> None:
    length, streams, *_ = socket.recv_fds(line, 10, 2)
    asked = b""
    while len(asked) < int(length):
        asked += line.recv(65536)
    job = json.loads(asked)
    pid = os.fork()
    if pid == 0:
        line.close()
        _become(job, *streams)
    for stream in streams:
        os.close(stream)
    line.sendall(b"%d" % pid)
    child = os.pidfd_open(pid)
    if line in select.select([child, line], [], [])[0]:  # the requester has exited
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        line.sendall(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become(job: dict[str, Any], reads: int, writes: int) -> None:
    import multiprocessing.context as contexts

    os.setsid()
    for number, fd in enumerate((reads, writes, writes)):
        os.dup2(fd, number)
    os.environ.clear()
    os.environ.update(job["environ"])
    os.chdir(job["cwd"])
    tempfile.tempdir = None  # of the worker that started this; each has its own
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    contexts._concrete_contexts["spawn"] = contexts._concrete_contexts["fork"]
    if Path(sys.path[0], "sitecustomize.py").exists():
        runpy.run_path(str(Path(sys.path[0], "sitecustomize.py")))  # as where Python starts
    program, *rest = job["arguments"]
    if rest[0] == "-m":
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *rest]
        runpy.run_path(program, run_name="__main__")
    raise SystemExit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
