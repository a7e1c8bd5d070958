"""A process of the host, with its data directory there too, where the server opens files itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from typing import Any

from . import datafiles
from .launcher import SandboxError


class LocalProcess:
    """What the ordinary processes among `launcher.Sandbox`es share; all that one writes is below `home`.

    reasons: of a death, by exit status
    """

    def __init__(self, home: str, reasons: Mapping[int, str]) -> None:
        loop = asyncio.get_running_loop()
        self._home = home
        self._data = f"{home}/data"
        self._reasons = reasons
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._pidfd = -1
        self._reason = ""
        self.exited: asyncio.Future[None] = loop.create_future()
        self.death: asyncio.Future[tuple[int, str]] = loop.create_future()

    async def _run(self, *command: str, **options: Any) -> None:
        """Starts the program in a new session. Raises SandboxError."""
        self.death = asyncio.get_running_loop().create_future()
        self._reason = ""
        try:
            self._process = await asyncio.create_subprocess_exec(*command, start_new_session=True, **options)
        except OSError as error:
            raise SandboxError(f"cannot run {command[0]}: {error}") from error
        with contextlib.suppress(ProcessLookupError):  # it may be over already
            self._pidfd = os.pidfd_open(self._process.pid)
        self._watch = asyncio.create_task(self._wait(self._process, self.death))

    async def _wait(self, process: asyncio.subprocess.Process, death: asyncio.Future[tuple[int, str]]) -> None:
        code = await process.wait()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if not death.done():
            death.set_result((code, self._reason or self._reasons.get(code, "died")))

    def _signal(self, number: signal.Signals) -> None:
        # Not Process.send_signal: that polls first, and takes the exit status away from asyncio's watcher.
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def thaw(self) -> None:
        if self.exited.done():
            raise SandboxError("the process is gone")

    async def kill_payload(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._signal(signal.SIGKILL)
        await self.death

    async def list_files(self) -> list[tuple[str, int, int, int]]:
        return await asyncio.to_thread(datafiles.regular_files, self._data)

    async def open_file(self, path: str) -> int:
        try:
            return datafiles.open_regular(self._data, path)
        except (OSError, ValueError) as error:
            raise SandboxError(str(error)) from error

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _remove(self) -> None:
        """Removes `home`."""
        raise NotImplementedError

    async def aclose(self) -> None:
        self.kill()
        if self._watch is not None:
            await asyncio.shield(self._watch)
        if not self.exited.done():
            self.exited.set_result(None)
            await asyncio.to_thread(self._remove)
