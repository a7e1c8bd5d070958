"""One conversation's notebook: a kernel that is frozen between calls, its files, and words about what was lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import Any

from vllm_gptoss.tools.protocol import Content, File, Text, ToolError, ToolResult
from vllm_gptoss.tools.sandbox.launcher import SandboxError

from .client import KernelError
from .files import FileStore
from .messages import KernelMessage
from .options import PythonOptions
from .output import OutputCollector
from .pool import CagedKernel, KernelPool
from .tasks import uninterrupted

logger = logging.getLogger(__name__)

_DEATH_S = 1.0  # a dying kernel closes its sockets a moment before its exit is reported
_VARIABLES_LOST = "All variables are lost; files in /mnt/data are kept."
_FATAL = {"gone": "its first process ended", "files": "it made more files, or folders in folders, than it may"}
_ALL_LOST = "All variables and all files in /mnt/data are lost."
_UNSEEN = (
    "[Calls that you do not see ran in this python session since the last one that you see: of another attempt at this"
    " answer, say. Their variables and files may be here.]"
)


async def _first(a: asyncio.Future[Any], b: asyncio.Future[Any], timeout_s: float) -> set[asyncio.Future[Any]]:
    done, _ = await asyncio.wait({a, b}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return done


def new_container_id() -> str:
    return f"cntr_{secrets.token_hex(16)}"


class Container:
    """`run` is called once at a time. `lost` is reported to the model at its next call."""

    def __init__(
        self,
        pool: KernelPool,
        store: FileStore,
        options: PythonOptions,
        lost: str = "",
        owner: str = "",
        container_id: str = "",
    ) -> None:
        self.id = container_id or new_container_id()
        self.lost = lost
        self.last_call = ""  # a name for what has run last, on which the present state rests
        self.owner = owner
        self.memory = 0  # bytes held between calls
        self.closed = False  # no call may start any more
        self.last_used = time.monotonic()
        self.lock = asyncio.Lock()
        self._pool = pool
        self._store = store
        self._options = options
        self._kernel: CagedKernel | None = None
        self._needs_kernel = False  # the cage is alive, its kernel is not
        self._known: dict[str, tuple[int, int, int]] = {}

    @property
    def alive(self) -> bool:
        return self._kernel is not None

    def tell(self, lost: str) -> None:
        """Appends `lost` to losses not yet reported: a cancelled call reported nothing."""
        if lost not in self.lost:
            self.lost = f"{self.lost} {lost}".lstrip()

    async def run(self, code: str, seen: str | None = None) -> ToolResult:
        """Runs one cell. Raises only CancelledError, after the code stopped.

        seen: `last_call` as the conversation knows it, or None. If other calls ran since, the model is informed.
        """
        async with self.lock:
            self.last_used = time.monotonic()
            if self.closed:
                return self._result([Text("[not run: the session was closed]")], ToolError("unavailable", "closed"))
            try:
                kernel = await self._thawed()
            except SandboxError as error:
                logger.warning("python call refused: %s", error)
                return self._result([Text(f"[python is unavailable: {error}]")], ToolError("unavailable", str(error)))
            if seen is not None and self.last_call not in ("", seen):
                self.tell(_UNSEEN)
            try:
                return await self._call(kernel, code)
            except SandboxError as error:  # the cage itself went away under the call
                await uninterrupted(self.discard(""))
                message = f"The python sandbox is gone: {error}. {_ALL_LOST}"
                return self._result([Text(f"[{message}]")], ToolError("tool_failed", message))
            except Exception:  # a bug of the plugin: the program must not continue without supervision
                logger.exception("a python call failed outside its contract; its sandbox is closed")
                await uninterrupted(self.discard(""))
                message = f"The python tool failed and its sandbox was closed. {_ALL_LOST}"
                return self._result([Text(f"[{message}]")], ToolError("tool_failed", message))
            finally:
                self.last_used = time.monotonic()

    async def _thawed(self) -> CagedKernel:
        """A kernel that runs. Raises SandboxError."""
        kernel = await self._ensure()
        try:
            await uninterrupted(kernel.sandbox.thaw())
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                await uninterrupted(kernel.sandbox.settle())
            raise
        except SandboxError:  # died since its last call; nothing of this call ran, so another may take it
            if self.closed:
                raise
            await uninterrupted(self.discard(f"[The python sandbox died between calls. {_ALL_LOST}]"))
            kernel = await self._ensure()
            await kernel.sandbox.thaw()
        return kernel

    async def _ensure(self) -> CagedKernel:
        if self._kernel is not None and self._kernel.sandbox.exited.done():
            await uninterrupted(self.discard(f"[The python sandbox died between calls. {_ALL_LOST}]"))
        if self._kernel is None:
            self._kernel = await self._pool.acquire()
            if self.closed:
                await uninterrupted(self.discard(""))
                raise SandboxError("the session was closed")
            self._known = {}
            self._needs_kernel = False
        elif self._needs_kernel or self._kernel.sandbox.death.done():
            if not self._needs_kernel:
                self.tell(f"[The python kernel died between calls. {_VARIABLES_LOST}]")
            await self._kernel.client.aclose()
            try:
                self._kernel.client = await self._pool.start_kernel(self._kernel.sandbox)
            except BaseException:
                await uninterrupted(self.discard(f"[The python kernel could not be restarted. {_ALL_LOST}]"))
                raise
            self._needs_kernel = False
        return self._kernel

    async def _call(self, kernel: CagedKernel, code: str) -> ToolResult:
        o = self._options
        outputs = OutputCollector(
            max_chars=o.max_output_chars, max_images=o.max_images, max_image_bytes=o.max_message_mib << 20
        )
        before, self.last_call = self.last_call, secrets.token_hex(16)
        running = asyncio.create_task(kernel.client.execute(code, outputs.add))
        try:
            error, note = await self._outcome(kernel, running, outputs)
            await kernel.sandbox.settle()
            files = await self._new_files(kernel)
            self.memory = await kernel.sandbox.memory()
        except asyncio.CancelledError:
            self.last_call = before  # the next call, of any caller, reports this one
            await uninterrupted(self._stop_cancelled(kernel, running))
            raise
        finally:
            running.cancel()
            running.add_done_callback(lambda task: task.cancelled() or task.exception())  # retrieved: no warning
        contents = outputs.contents() + ([Text(note)] if note else []) + files
        return self._result(contents or [Text("(no output)")], error, self.last_call)

    async def _outcome(
        self, kernel: CagedKernel, running: asyncio.Task[KernelMessage], outputs: OutputCollector
    ) -> tuple[ToolError | None, str]:
        """Waits until the call ends by its result, the sandbox's death or the timeout: (error, note for the model)."""
        death = kernel.sandbox.death
        done = await _first(running, death, self._options.timeout_s)
        if not done:
            return await self._timed_out(kernel, running)
        if running not in done:
            return self._died(*death.result())
        try:
            reply = running.result()
        except KernelError as error:
            if death in await _first(death, death, _DEATH_S):
                return self._died(*death.result())
            await self._kill_kernel(kernel, "protocol")
            return ToolError("resource_limit", str(error)), f"[{error}. The kernel was stopped. {_VARIABLES_LOST}]"
        if reply.content.get("exits"):
            await self._kill_kernel(kernel, "exit")
            return None, f"[The code asked the notebook to exit. {_VARIABLES_LOST}]"
        if outputs.error is not None or reply.content.get("failed"):
            name, value = outputs.error or (reply.content.get("ename"), reply.content.get("evalue"))
            return ToolError("tool_failed", f"{name}: {value}"), ""
        return None, ""

    async def _timed_out(self, kernel: CagedKernel, running: asyncio.Task[KernelMessage]) -> tuple[ToolError, str]:
        message = f"Execution timed out after {self._options.timeout_s:g} seconds."
        if await self._interrupt(kernel, running):
            return ToolError("timeout", message), f"[{message} It was interrupted; variables are kept.]"
        await self._kill_kernel(kernel, "timeout")
        return ToolError("timeout", message), f"[{message} It did not stop and was killed. {_VARIABLES_LOST}]"

    async def _interrupt(self, kernel: CagedKernel, running: asyncio.Task[KernelMessage]) -> bool:
        await kernel.sandbox.interrupt()
        done = await _first(running, kernel.sandbox.death, self._options.interrupt_grace_s)
        return running in done and running.exception() is None

    async def _kill_kernel(self, kernel: CagedKernel, reason: str) -> None:
        self._needs_kernel = True
        if not kernel.sandbox.death.done():
            await kernel.sandbox.kill_payload(reason)

    def _died(self, code: int, reason: str) -> tuple[ToolError, str]:
        self._needs_kernel = True
        if reason in _FATAL:
            raise SandboxError(_FATAL[reason])
        o = self._options
        limits = {
            "memory": f"{o.memory_mib} MiB of memory",
            "inodes": f"{o.inodes} files",
            "processes": f"{o.processes} processes",
            "descriptors": f"{o.limits().all_open_files} open files",
            "mappings": f"{o.limits().mappings} memory mappings",
            "locks": f"{o.limits().locks} locks on files",
        }
        if reason in limits:
            message = f"The python kernel was killed: it used more than {limits[reason]}."
            return ToolError("resource_limit", message), f"[{message} {_VARIABLES_LOST}]"
        message = (
            f"The python kernel exited with status {code}."
            if code >= 0
            else f"The python kernel died of signal {-code}."
        )
        return ToolError("tool_failed", message), f"[{message} {_VARIABLES_LOST}]"

    async def _stop_cancelled(self, kernel: CagedKernel, running: asyncio.Task[KernelMessage]) -> None:
        """After a cancelled call nothing runs any more; the next call reports it."""
        cancelled = "The previous python call was cancelled."
        try:
            if kernel.sandbox.death.done() or not (running.done() or await self._interrupt(kernel, running)):
                await self._kill_kernel(kernel, "cancelled")
                self.tell(f"[{cancelled} {_VARIABLES_LOST}]")
            else:
                self.tell(f"[{cancelled} Variables are kept as it left them.]")
            await kernel.sandbox.settle()
        except SandboxError:
            await self.discard(f"[{cancelled} {_ALL_LOST}]")

    async def _new_files(self, kernel: CagedKernel) -> list[Content]:
        """Files in /mnt/data that this call made or changed, copied out for download."""
        found = {path: (size, mtime, inode) for path, size, mtime, inode in await kernel.sandbox.list_files()}
        changed = [path for path, facts in found.items() if self._known.get(path) != facts]
        self._known = found
        contents: list[Content] = []
        for path in changed[: self._options.max_files_per_call]:
            contents.append(await self._copy_out(kernel, path))
        if len(changed) > self._options.max_files_per_call:
            contents.append(Text(f"[{len(changed) - self._options.max_files_per_call} more files were not copied out]"))
        return contents

    async def _copy_out(self, kernel: CagedKernel, path: str) -> File | Text:
        name = path.encode(errors="replace").decode()
        try:
            fd = await kernel.sandbox.open_file(path)
            return await self._store.put(self.id, name, fd, self._options.max_file_mib << 20, self.owner)
        except (ValueError, OSError, SandboxError) as error:
            return Text(f"[{name} cannot be downloaded: {error}]")

    def _result(self, contents: list[Content], error: ToolError | None, call: str = "") -> ToolResult:
        if self.lost:
            contents = [Text(self.lost), *contents]
            self.lost = ""
        recall = {"container": self.id} | ({"call": call} if call else {})
        return ToolResult(contents, error, container_id=self.id, recall=recall)

    def close(self) -> None:
        """Kills what runs, without waiting; a running call ends with an error."""
        self.closed = True
        if self._kernel is not None:
            self._kernel.sandbox.kill()

    async def discard(self, lost: str) -> None:
        """Kills everything; `lost` is reported at the next call."""
        kernel, self._kernel = self._kernel, None
        self.memory = 0
        self.last_call = ""
        self.lost = lost
        if kernel is not None:
            await self._pool.release(kernel)
