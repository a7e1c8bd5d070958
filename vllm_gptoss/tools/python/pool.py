"""Kernels: made by the fork server, kept warm, limited in number, and counted until they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_gptoss.tools.sandbox import bubblewrap
from vllm_gptoss.tools.sandbox.bubblewrap import Bubblewrap
from vllm_gptoss.tools.sandbox.cgroups import CgroupError, Cgroups
from vllm_gptoss.tools.sandbox.host import HostLauncher, HostProcess
from vllm_gptoss.tools.sandbox.launcher import Sandbox, SandboxError, Zygote
from vllm_gptoss.tools.sandbox.spec import Spec

from .client import KernelClient, KernelError
from .options import PythonOptions
from .tasks import uninterrupted
from .view import build_view

logger = logging.getLogger(__name__)

_PAYLOAD = Path(__file__).with_name("payload.py")
_CONNECT_S = 20.0


Launcher = Zygote | Bubblewrap | HostLauncher


@dataclass(slots=True)
class Kernel:
    """A cage and the client of the kernel in it."""

    sandbox: Sandbox | HostProcess
    client: KernelClient

    async def aclose(self) -> None:
        await self.client.aclose()
        await self.sandbox.aclose()


class KernelPool:
    """`evict_idle` frees a kernel that is not in use, or returns False; called when `max_conversations` are alive."""

    def __init__(self, options: PythonOptions, evict_idle: Callable[[], bool]) -> None:
        self._options = options
        self._evict_idle = evict_idle
        self._zygote: Launcher | None = None
        self._zygote_lock = asyncio.Lock()
        self._warm: list[Kernel] = []
        self._alive = 0  # handed out and not yet gone
        self._freed = asyncio.Condition()
        self._refill: asyncio.Task[None] | None = None
        self._closed = False
        self._waiting = 0
        self._leaving = 0  # being evicted for somebody who waits

    async def start(self) -> None:
        """Starts the fork server and the first kernels. Raises SandboxError with the reason why not."""
        await self._ensure_zygote()
        kernel = await self._new()
        if self._options.warm:
            self._warm.append(kernel)
            self._start_refill()
        else:
            await kernel.aclose()

    async def _ensure_zygote(self) -> Launcher:
        async with self._zygote_lock:
            if self._zygote is not None and self._zygote.alive:
                return self._zygote
            if self._zygote is not None:
                logger.warning("the python tool's fork server died; starting another")
                await self._zygote.aclose()
            self._zygote = await self._make_zygote()
            return self._zygote

    async def _make_zygote(self) -> Launcher:
        """The fork server; where it cannot be had and nobody insisted, bubblewrap. Raises SandboxError."""
        o = self._options
        spec = Spec(await build_view(o), o.limits(), str(_PAYLOAD), self._payload_options())
        if o.dangerously_run_python_on_host:
            logger.warning("python runs ON THE HOST without isolation, as dangerously_run_python_on_host asks")
            return HostLauncher(spec, str(o.python))
        try:
            cgroups = await asyncio.to_thread(Cgroups, o.cgroup) if o.cgroup else None
        except CgroupError as error:
            raise SandboxError(str(error)) from error
        if o.launcher != "bubblewrap":
            zygote = Zygote(spec, str(o.python), cgroups)
            try:
                await zygote.start(o.start_timeout_s)
                await (await zygote.spawn()).aclose()  # the second ring may be forbidden where the first is not
                return zygote
            except SandboxError as error:
                await zygote.aclose()
                if o.launcher == "namespaces" or bubblewrap.find() is None:
                    raise
                logger.warning("python: own namespaces cannot be had (%s); using bubblewrap", error)
        wrapper = Bubblewrap(spec, str(o.python), cgroups)
        await wrapper.start(o.start_timeout_s)
        return wrapper

    def _payload_options(self) -> dict[str, object]:
        o = self._options
        return {
            "preload": list(o.preload),
            "required": list(o.packages),
            # The server truncates for the model; this only keeps a flood out of memory.
            "max_output_chars": max(4 * o.max_output_chars, 1 << 20),
            "max_message_bytes": o.max_message_mib << 20,
        }

    async def _new(self) -> Kernel:
        zygote = await self._ensure_zygote()
        sandbox = await zygote.spawn()
        client: KernelClient | None = None
        try:
            client = await self.start_kernel(sandbox)
            await sandbox.settle()
        except BaseException:
            if client is not None:
                await uninterrupted(client.aclose())
            await uninterrupted(sandbox.aclose())
            raise
        return Kernel(sandbox, client)

    async def start_kernel(self, sandbox: Sandbox | HostProcess) -> KernelClient:
        """Starts a kernel in a cage that has none (any more). Raises SandboxError."""
        # Names nobody inside could have guessed, so none can be there already.
        name, key = f"k{secrets.token_hex(12)}", secrets.token_hex(32)
        await sandbox.start({"ip": f"{sandbox.sockets}/{name}", "key": key}, self._options.start_timeout_s)
        limit = self._options.max_message_mib << 20
        try:
            return await KernelClient.connect(
                sandbox.directory, name, key, max_message=limit + (1 << 20), max_total=8 * limit, timeout_s=_CONNECT_S
            )
        except KernelError as error:
            raise SandboxError(str(error)) from error

    async def acquire(self) -> Kernel:
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

    async def release(self, kernel: Kernel) -> None:
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
        """Kills the fork server and everything that came from it."""
        self._closed = True
        if self._refill is not None:
            self._refill.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refill
        for kernel in self._warm:
            await kernel.aclose()
        self._warm.clear()
        if self._zygote is not None:
            await self._zygote.aclose()
