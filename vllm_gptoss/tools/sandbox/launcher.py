"""The server's side: starts the zygote, requests cages, and holds each by a socket and a pidfd; never blocks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import wire
from .cgroups import CgroupError, Cgroups, Leaf
from .spec import SOCKETS, Spec

logger = logging.getLogger(__name__)

PACKAGE = str(Path(__file__).parent)


def loader(module: str) -> str:
    """A program that runs `module` of this package, loaded by path under a separate name: `-I` ignores PYTHONPATH,
    and the interpreter may lack vllm_gptoss."""
    return (
        "import importlib.util as u, sys\n"
        "s = u.spec_from_file_location('gptoss_sandbox', sys.argv[1] + '/__init__.py',"
        " submodule_search_locations=[sys.argv[1]])\n"
        "m = u.module_from_spec(s); sys.modules['gptoss_sandbox'] = m; s.loader.exec_module(m)\n"
        f"from gptoss_sandbox import {module}; {module}.main(sys.argv[2:])\n"
    )


LOADER = loader("zygote")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",  # noqa: S108 - the cage's own
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    # A thread pool in the zygote would not survive the fork, and each thread counts against the process limit.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # glibc reserves 64 MiB of address space per thread otherwise
}
_REPLY_S = 30.0
_SPAWN_S = 30.0


class SandboxError(Exception):
    """The cage cannot be had, or is gone."""


class IsolationError(SandboxError):
    """The host does not allow this way of isolation; another may work."""


class SandboxChannel:
    """One end of a `wire` pair on the event loop: replies by id, everything else to `on_event`."""

    def __init__(self, sock: socket.socket, on_event: Callable[[dict[str, Any], list[int]], None]) -> None:
        self._sock = sock
        self._on_event = on_event
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self._loop = asyncio.get_running_loop()
        self.closed = self._loop.create_future()
        sock.setblocking(False)
        self._loop.add_reader(sock, self._read)

    def _read(self) -> None:
        try:
            received = wire.receive(self._sock)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            received = None
        if received is None:
            self.close()
            return
        message, fds = received
        future = self._waiting.pop(message.get("id", 0), None)
        if future is None or future.done():
            if "id" in message:
                _close_all(fds)
            else:
                self._on_event(message, fds)
            return
        future.set_result(received)

    def post(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        """Sends without waiting. Raises SandboxError if the other side is gone or does not read."""
        try:
            wire.send(self._sock, message, fds or [])
        except OSError as error:
            self.close()
            raise SandboxError("the sandbox is gone") from error

    async def request(self, operation: str, **fields: Any) -> tuple[dict[str, Any], list[int]]:
        """Sends an operation and waits for its reply. Raises SandboxError."""
        number = next(self._ids)
        future: asyncio.Future[tuple[dict[str, Any], list[int]]] = self._loop.create_future()
        self._waiting[number] = future
        try:
            self.post({"op": operation, "id": number, **fields})
            async with asyncio.timeout(_REPLY_S):
                reply, fds = await future
        except TimeoutError as error:
            raise SandboxError(f"the sandbox did not answer {operation!r} in {_REPLY_S:.0f} s") from error
        finally:
            self._waiting.pop(number, None)
        if "error" in reply:
            _close_all(fds)
            raise SandboxError(reply["error"])
        return reply, fds

    def close(self) -> None:
        if self.closed.done():
            return
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self.closed.set_result(None)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxError("the sandbox is gone"))
                future.exception()  # seen: its waiter may have been cancelled


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _pid_of(pidfd: int) -> int:
    """The process' number as this process counts: proc(5), /proc/pid/fdinfo."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


class Zygote:
    """The warm fork server. `start` raises SandboxError with the reason why isolation cannot be had here."""

    def __init__(self, spec: Spec, python: str = sys.executable, cgroups: Cgroups | None = None) -> None:
        self._spec = spec
        self._python = python
        self._cgroups = cgroups
        self._process: asyncio.subprocess.Process | None = None
        self._channel: SandboxChannel | None = None
        self._first: asyncio.Future[dict[str, Any]] | None = None
        self.hung = False  # it answers no more; the cages it made before live on

    @property
    def alive(self) -> bool:
        return self._channel is not None and not self._channel.closed.done() and not self.hung

    async def start(self, timeout_s: float) -> None:
        """Starts the process and waits until it is ready to fork. Raises SandboxError."""
        ours, theirs = wire.pair()
        arguments = [PACKAGE, "zygote", str(theirs.fileno())]
        try:
            self._process = await asyncio.create_subprocess_exec(
                self._python,
                *("-I", "-X", "faulthandler", "-c", LOADER, *arguments),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise SandboxError(f"cannot run {self._python}: {error}") from error
        finally:
            theirs.close()
        self._first = asyncio.get_running_loop().create_future()
        self._channel = SandboxChannel(ours, self._on_event)
        with contextlib.suppress(SandboxError):  # then it is closed, which the next line detects
            self._channel.post(asdict(self._spec))
        self._channel.closed.add_done_callback(lambda _: self._on_event({"event": "failed", "error": "died"}, []))
        try:
            async with asyncio.timeout(timeout_s):
                first = await asyncio.shield(self._first)
        except TimeoutError:
            first = {"event": "failed", "error": f"not ready after {timeout_s:.0f} s"}
        except asyncio.CancelledError:
            await asyncio.shield(self.aclose())
            raise
        if first["event"] != "ready":
            await self.aclose()
            raise (IsolationError if first.get("isolation") else SandboxError)(first.get("error", "unknown"))

    def _on_event(self, message: dict[str, Any], fds: list[int]) -> None:
        _close_all(fds)
        if self._first is not None and not self._first.done():
            self._first.set_result(message)

    async def spawn(self) -> Sandbox:
        """A new cage, nothing running in it yet. Raises SandboxError."""
        if self._channel is None:
            raise SandboxError("the fork server was not started")
        ours, theirs = wire.pair()
        sandbox = Sandbox(ours)
        try:
            self._channel.post({"op": "spawn"}, [theirs.fileno()])
        except BaseException:
            sandbox.kill()
            raise
        finally:
            theirs.close()
        try:
            async with asyncio.timeout(_SPAWN_S):
                await sandbox.hello
            await sandbox.join(self._cgroups, self._spec)
        except BaseException as error:
            sandbox.kill()
            if isinstance(error, TimeoutError):
                self.hung = True
                raise SandboxError(f"no cage after {_SPAWN_S:.0f} s") from error
            raise
        return sandbox

    async def aclose(self) -> None:
        """Ends the zygote and, with its pid namespace, every cage it made."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None


class Sandbox:
    """One cage. After `exited` is set nothing of it is left."""

    sockets = SOCKETS  # where the payload listens, as it sees it

    def __init__(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._pidfd = -1
        self.directory = -1  # O_PATH descriptor of the directory with the payload's sockets
        self.hello: asyncio.Future[None] = loop.create_future()
        self.exited: asyncio.Future[None] = loop.create_future()
        self._started: asyncio.Future[None] | None = None
        # Set when the payload dies: (exit code, negative for a signal; reason: a limit, killed, died, gone).
        self.death: asyncio.Future[tuple[int, str]] = loop.create_future()
        self._leaf: Leaf | None = None
        self._channel = SandboxChannel(sock, self._on_event)
        self._channel.closed.add_done_callback(lambda _: self._on_closed())

    async def join(self, cgroups: Cgroups | None, spec: Spec) -> None:
        """Puts the cage into its cgroup, before anything runs in it. Raises SandboxError."""
        if cgroups is None:
            return
        try:
            self._leaf = await asyncio.to_thread(cgroups.leaf, spec.limits)
            await asyncio.to_thread(self._leaf.add, _pid_of(self._pidfd))
        except (CgroupError, OSError) as error:
            raise SandboxError(str(error)) from error

    def _on_event(self, message: dict[str, Any], fds: list[int]) -> None:
        event = message.get("event")
        if event == "hello" and len(fds) == 2 and self._pidfd < 0:
            self._pidfd, self.directory = fds
            self._loop.add_reader(self._pidfd, self._on_exit)
            if not self.hello.done():
                self.hello.set_result(None)
            return
        _close_all(fds)
        if event == "failed":
            self._fail(SandboxError(str(message.get("error"))))
        elif event == "ready" and self._started is not None and not self._started.done():
            self._started.set_result(None)
        elif event == "exit":
            stderr = str(message.get("stderr", ""))
            self._on_death(int(message.get("code", 0)), str(message.get("reason", "")), stderr)

    def _on_death(self, code: int, reason: str, stderr: str = "") -> None:
        if code == -signal.SIGKILL and self._leaf is not None and self._leaf.out_of_memory():
            reason = "memory"
        if not self.death.done():
            self.death.set_result((code, reason))
        if self._started is not None and not self._started.done():
            error = SandboxError(f"the payload ended with {code} ({reason}) before it was ready: {stderr}")
            self._started.set_exception(error)
            self._started.exception()

    def _fail(self, error: SandboxError) -> None:
        for future in (self.hello, self._started):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()

    def _on_closed(self) -> None:
        self._fail(SandboxError("the sandbox is gone"))
        self._on_death(0, "gone")
        if self._pidfd < 0 and not self.exited.done():
            self.exited.set_result(None)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        _close_all([self._pidfd, self.directory])
        self._pidfd = -2
        self.directory = -1
        self._channel.close()
        self._leave()
        if not self.exited.done():
            self.exited.set_result(None)

    def _leave(self, tries: int = 50) -> None:
        if self._leaf is None or self._leaf.remove():
            return
        if tries:
            self._loop.call_later(0.1, self._leave, tries - 1)
        else:
            logger.warning("cgroup %s stays busy; it is left behind", self._leaf.path)

    async def start(self, argument: dict[str, Any], timeout_s: float) -> None:
        """Starts the payload and waits until it serves. Raises SandboxError."""
        self.death = self._loop.create_future()
        self._started = self._loop.create_future()
        await self._channel.request("start", argument=argument)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._started)
        except TimeoutError as error:
            raise SandboxError(f"the payload did not serve after {timeout_s:.0f} s") from error

    def post(self, message: dict[str, Any]) -> None:
        """Sends what has no reply. Raises SandboxError."""
        self._channel.post(message)

    async def thaw(self) -> None:
        await self._channel.request("thaw")

    async def settle(self) -> None:
        """Stops the payload and kills everything else it started."""
        await self._channel.request("settle")

    async def interrupt(self) -> None:
        await self._channel.request("interrupt")

    async def kill_payload(self, reason: str) -> None:
        """Kills every process but pid 1; files stay."""
        await self._channel.request("kill", reason=reason)
        await self.death

    async def memory(self) -> int:
        """Bytes beyond what the payload started with, files included."""
        reply, _ = await self._channel.request("memory")
        return int(reply["memory"])

    async def list_files(self) -> list[tuple[str, int, int, int]]:
        """Regular files in /mnt/data: (relative path, bytes, mtime ns, inode)."""
        found: list[tuple[str, int, int, int]] = []
        more = True
        while more:
            reply, _ = await self._channel.request("list", offset=len(found))
            found += [(str(p), int(s), int(m), int(i)) for p, s, m, i in reply["files"]]
            more = bool(reply["more"] and reply["files"])
        return found

    async def open_file(self, path: str) -> int:
        """A read-only descriptor of a regular file in /mnt/data; the caller closes it. Raises SandboxError."""
        _, fds = await self._channel.request("open", path=path)
        if len(fds) != 1:
            _close_all(fds)
            raise SandboxError(f"no descriptor for {path!r}")
        return fds[0]

    def kill(self) -> None:
        """Kills pid 1 and thereby all of it; `exited` resolves at the end."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._channel.close()

    async def aclose(self) -> None:
        self.kill()
        await asyncio.shield(self.exited)
