"""Kernels: made by the chosen tier, prepared, limited in number, and counted until they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_gptoss.tools.sandbox.host import HostProcess
from vllm_gptoss.tools.sandbox.launcher import Sandbox, SandboxError
from vllm_gptoss.tools.sandbox.portable import PortableProcess

from .options import PythonOptions
from .tasks import uninterrupted
from .tiers import TIER, Client, TierChoice, choose

logger = logging.getLogger(__name__)

AnySandbox = Sandbox | HostProcess | PortableProcess


@dataclass(slots=True)
class CagedKernel:
    """A cage and the client of the kernel in it."""

    sandbox: AnySandbox
    client: Client

    async def aclose(self) -> None:
        await self.client.aclose()
        await self.sandbox.aclose()


class KernelPool:
    """`evict_idle` frees a kernel that is not in use, or returns False; called when `max_conversations` are alive."""

    def __init__(self, options: PythonOptions, evict_idle: Callable[[], bool]) -> None:
        self._options = options
        self._evict_idle = evict_idle
        self.choice: TierChoice | None = None
        self._launcher_lock = asyncio.Lock()
        self._warm: list[CagedKernel] = []
        self._alive = 0  # handed out and not yet gone
        self._freed = asyncio.Condition()
        self._refill: asyncio.Task[None] | None = None
        self._retired: list[Any] = []
        self._closed = False
        self._waiting = 0
        self._leaving = 0  # being evicted for a waiting call

    async def start(self) -> None:
        """Starts the launcher and the first kernels. Raises SandboxError with the reason why not."""
        await self._ensure_launcher()
        kernel = await self._new()
        if self._options.warm:
            self._warm.append(kernel)
            self._start_refill()
        else:
            await kernel.aclose()

    async def _ensure_launcher(self) -> Any:
        async with self._launcher_lock:
            if self.choice is not None and self.choice.launcher.alive:
                return self.choice.launcher
            if self.choice is not None:
                await self._retire(self.choice.launcher)
            self.choice = await choose(self._options)
            TIER.labels(self.choice.tier.name).set(1)
            return self.choice.launcher

    async def _retire(self, launcher: Any) -> None:
        """Gives up a launcher that makes no cages any more. One that hangs stays, for those it made live in it."""
        if launcher.hung:
            logger.warning("the python tool's launcher answers no more; starting another")
            self._retired.append(launcher)
            return
        logger.warning("the python tool's launcher died; starting another")
        await launcher.aclose()

    async def _new(self) -> CagedKernel:
        sandbox: AnySandbox = await (await self._ensure_launcher()).spawn()
        client: Client | None = None
        try:
            client = await self.start_kernel(sandbox)
            await sandbox.settle()
        except BaseException:
            if client is not None:
                await uninterrupted(client.aclose())
            await uninterrupted(sandbox.aclose())
            raise
        return CagedKernel(sandbox, client)

    async def start_kernel(self, sandbox: AnySandbox) -> Client:
        """Starts a kernel in a cage that has none (any more). Raises SandboxError."""
        if self.choice is None:
            raise SandboxError("the pool was not started")
        return await self.choice.tier.connect(self._options, sandbox)

    async def acquire(self) -> CagedKernel:
        """A ready kernel, frozen. Raises SandboxError when all are busy or none can be made."""
        await self._reserve()
        try:
            while self._warm:
                kernel = self._warm.pop(0)
                self._start_refill()
                if not kernel.sandbox.exited.done() and not kernel.sandbox.death.done():
                    return kernel
                await kernel.aclose()
            kernel = await self._new()
            self._start_refill()
            return kernel
        except BaseException:
            await uninterrupted(self._unreserve())
            raise

    async def _reserve(self) -> None:
        async with self._freed:
            self._waiting += 1
            self.make_room()
            try:
                async with asyncio.timeout(self._options.queue_s):
                    await self._freed.wait_for(lambda: self._alive < self._options.max_conversations)
            except TimeoutError as error:
                busy = f"all {self._options.max_conversations} python kernels are busy"
                raise SandboxError(f"{busy}; none became free in {self._options.queue_s:.0f} s") from error
            finally:
                self._waiting -= 1
            self._alive += 1

    def make_room(self) -> None:
        """Evicts an idle conversation for each waiting one that no place is free or on its way for."""
        while self._waiting > self._leaving + self._options.max_conversations - self._alive and self._evict_idle():
            self._leaving += 1

    async def _unreserve(self) -> None:
        async with self._freed:
            self._alive -= 1
            self._leaving = max(0, self._leaving - 1)
            self._freed.notify()

    async def release(self, kernel: CagedKernel) -> None:
        """Kills an acquired kernel and makes its place free once nothing of it is left."""
        try:
            await kernel.aclose()
        finally:
            await self._unreserve()

    def _start_refill(self) -> None:
        if not self._closed and (self._refill is None or self._refill.done()):
            self._refill = asyncio.create_task(self._fill())

    async def _fill(self) -> None:
        try:
            while len(self._warm) < self._options.warm and not self._closed:
                self._warm.append(await self._new())
        except SandboxError as error:
            logger.warning("python: no kernel for the warm pool: %s", error)

    async def aclose(self) -> None:
        self._closed = True
        if self._refill is not None:
            self._refill.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refill
        for kernel in self._warm:
            await kernel.aclose()
        self._warm.clear()
        for launcher in (*self._retired, *([self.choice.launcher] if self.choice else [])):
            await launcher.aclose()
