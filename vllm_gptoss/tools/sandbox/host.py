"""No sandbox: the payload as an ordinary process of the server's user, if `dangerously_run_python_on_host` is set.

The process sees the whole host, the network and other conversations' processes. What is left is hygiene: a clean
environment, a temporary directory, a separate session that is killed as a group, and death with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from typing import Any

from .launcher import ENVIRONMENT, LOADER, PACKAGE, SandboxError
from .local_files import LocalFiles
from .spec import Spec


class HostLauncher:
    hung = False

    def __init__(self, spec: Spec, python: str = sys.executable) -> None:
        self._spec = spec
        self._python = python
        self.alive = True

    async def start(self, timeout_s: float) -> None:
        """Nothing to prepare."""

    async def spawn(self) -> HostProcess:
        return HostProcess(self._spec, self._python)

    async def aclose(self) -> None:
        self.alive = False


class HostProcess(LocalFiles):
    """`launcher.Sandbox` without the walls; nothing is stopped between calls."""

    def __init__(self, spec: Spec, python: str) -> None:
        loop = asyncio.get_running_loop()
        self._spec = spec
        self._python = python
        self._home = tempfile.mkdtemp(prefix="gptoss-python-")
        self._data = os.path.join(self._home, "data")
        self.sockets = os.path.join(self._home, "s")
        os.mkdir(self._data)
        os.mkdir(self.sockets)
        self.directory = os.open(self.sockets, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self.exited: asyncio.Future[None] = loop.create_future()
        self.death: asyncio.Future[tuple[int, str]] = loop.create_future()

    async def start(self, argument: dict[str, Any], timeout_s: float) -> None:
        """Starts the payload and waits until it serves. Raises SandboxError."""
        self.death = asyncio.get_running_loop().create_future()
        read_end, write_end = os.pipe()
        words = [PACKAGE, "host", str(write_end), json.dumps(self._spec.to_json()), json.dumps(argument)]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(self._python, "-I", "-c", LOADER, *words),
                pass_fds=[write_end],
                stdin=asyncio.subprocess.DEVNULL,
                env=ENVIRONMENT | {"HOME": self._home},
                cwd=self._data,
                start_new_session=True,
            )
        except OSError as error:
            os.close(read_end)
            raise SandboxError(f"cannot run {self._python}: {error}") from error
        finally:
            os.close(write_end)
        self._watch = asyncio.create_task(self._wait(self._process, self.death))
        reader = asyncio.StreamReader()
        pipe = os.fdopen(read_end, "rb")
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            async with asyncio.timeout(timeout_s):
                if not await reader.read(1):
                    raise SandboxError("the payload ended before it was ready")
        except TimeoutError as error:
            raise SandboxError(f"the payload did not serve after {timeout_s:.0f} s") from error

    async def _wait(self, process: asyncio.subprocess.Process, death: asyncio.Future[tuple[int, str]]) -> None:
        code = await process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left in its session
        if not death.done():
            death.set_result((code, "died"))

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def thaw(self) -> None:
        if self.exited.done():
            raise SandboxError("the process is gone")

    async def settle(self) -> None:
        """Nothing: without a pid namespace there is no telling what belongs to the payload."""

    async def interrupt(self) -> None:
        self._signal(signal.SIGINT)

    async def kill_payload(self, reason: str) -> None:
        self._signal(signal.SIGKILL)
        await self.death

    async def usage(self) -> dict[str, int]:
        return {"memory": 0, "processes": 0}

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def aclose(self) -> None:
        self.kill()
        if self._watch is not None:
            await asyncio.shield(self._watch)
        if not self.exited.done():
            self.exited.set_result(None)
            os.close(self.directory)
            await asyncio.to_thread(shutil.rmtree, self._home, ignore_errors=True)
