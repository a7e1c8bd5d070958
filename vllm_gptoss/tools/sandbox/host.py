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
from dataclasses import asdict
from typing import Any

from .launcher import ENVIRONMENT, LOADER, PACKAGE, SandboxError
from .local_process import LocalProcess
from .spec import Spec


class HostLauncher:
    hung = False

    def __init__(self, spec: Spec, python: str = sys.executable) -> None:
        self._spec = spec
        self._python = python
        self.alive = True

    async def spawn(self) -> HostProcess:
        return HostProcess(self._spec, self._python)

    async def aclose(self) -> None:
        self.alive = False


class HostProcess(LocalProcess):
    """`launcher.Sandbox` without the walls; nothing is stopped between calls."""

    def __init__(self, spec: Spec, python: str) -> None:
        super().__init__(tempfile.mkdtemp(prefix="gptoss-python-"), {})
        self._spec = spec
        self._python = python
        self.sockets = os.path.join(self._home, "s")
        os.mkdir(self._data)
        os.mkdir(self.sockets)
        self.directory = os.open(self.sockets, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    async def start(self, argument: dict[str, Any], timeout_s: float) -> None:
        """Starts the payload and waits until it serves. Raises SandboxError."""
        read_end, write_end = os.pipe()
        words = [PACKAGE, "host", str(write_end), json.dumps(asdict(self._spec)), json.dumps(argument)]
        try:
            await self._run(
                *(self._python, "-I", "-c", LOADER, *words),
                pass_fds=[write_end],
                stdin=asyncio.subprocess.DEVNULL,
                env=ENVIRONMENT | {"HOME": self._home},
                cwd=self._data,
            )
        except SandboxError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
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
        await process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left in its session
        await super()._wait(process, death)

    async def settle(self) -> None:
        """Nothing: without a pid namespace there is no telling what belongs to the payload."""

    async def interrupt(self) -> None:
        self._signal(signal.SIGINT)

    async def memory(self) -> int:
        return 0

    def _remove(self) -> None:
        os.close(self.directory)
        shutil.rmtree(self._home, ignore_errors=True)
