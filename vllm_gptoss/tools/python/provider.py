"""The `python` tool: a stateful notebook per conversation, behind the contract of `tools/protocol`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_gptoss.tools.protocol import (
    Namespace,
    SessionOptions,
    StoredFile,
    ToolCall,
    ToolProvider,
    ToolResult,
    ToolSession,
    failed,
    last_call,
    python_namespace,
)
from vllm_gptoss.tools.sandbox.launcher import SandboxError

from .container import Container, new_container_id
from .files import FileStore
from .kept import KeptFiles
from .options import PythonOptions
from .pool import KernelPool
from .quotas import PythonQuotaError, PythonQuotas, account
from .tasks import uninterrupted

logger = logging.getLogger(__name__)

_IDLE_LOST = (
    "[The python session was closed after a long time unused. All variables and all files in /mnt/data are lost.]"
)
_ROOM_LOST = "[The python session was closed to make room. All variables and all files in /mnt/data are lost.]"
_ELSEWHERE = (
    "[This python session is new: variables of earlier calls, and files in /mnt/data, are not here. The server was"
    " started again, or another of its processes ran those calls.]"
)
_ANOTHER = (
    "[This python session is not the one that earlier calls ran in: their variables, and files in /mnt/data, may not be"
    " here.]"
)
_REMEMBERED = 10_000  # conversations with a loss to report
_MAX_CODE = 1 << 20  # characters


class PythonProvider(ToolProvider):
    """State belongs to the conversation id and outlives its sessions until it is unused for `idle_s` or makes room."""

    name = "python"
    unavailable: str | None = "not started"

    def __init__(self, options: PythonOptions | None = None) -> None:
        self.options = options or PythonOptions()
        o = self.options
        self.at_once = o.max_conversations
        # Waiting for a kernel, starting it, the call, and the end of a call that does not stop.
        self.longest_call_s = o.queue_s + o.start_timeout_s + o.timeout_s + o.interrupt_grace_s
        self._quotas = PythonQuotas(o.caller_containers, o.caller_runs_per_minute, o.caller_files_mib << 20)
        self._store = FileStore(
            max_bytes=o.file_store_mib << 20,
            max_files=10_000,
            keep_s=o.file_keep_s,
            kept=KeptFiles(o.files) if o.files else None,
            quotas=self._quotas,
        )
        self._containers: dict[str, Container] = {}
        self._lost: OrderedDict[str, str] = OrderedDict()
        self._pool: KernelPool | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._evictions: set[asyncio.Task[None]] = set()

    @property
    def isolation(self) -> str:
        choice = self._pool.choice if self._pool is not None and self.unavailable is None else None
        return f"{choice.tier.name}: {choice.tier.what}" if choice else ""

    async def start(self) -> None:
        self._pool = KernelPool(self.options, self._evict_idle)
        started = time.monotonic()
        try:
            await self._store.open()
        except OSError as error:
            self.unavailable = str(error)
            return
        try:
            await self._pool.start()
        except (SandboxError, OSError) as error:
            self.unavailable = f"no isolation for python: {error}"
            logger.warning("tool %s is off: %s", self.name, self.unavailable)
            await self._pool.aclose()
            return
        self.unavailable = None
        self._sweeper = asyncio.create_task(self._sweep())
        logger.info("tool %s is ready after %.1f s (%s)", self.name, time.monotonic() - started, self.isolation)

    def namespaces(self) -> Sequence[Namespace]:
        return (python_namespace(self.options.timeout_s),)

    async def open(self, conversation_id: str, options: SessionOptions) -> PythonSession:
        """The conversation's notebook; with an empty id, a private one that ends with the session."""
        before = [call for call in options.past if call.get("recipient") == self.name]
        there = self._containers.get(conversation_id)
        seen = last_call(before) if options.knows_all else None
        if conversation_id and before and there is None:
            self._remember_loss(conversation_id, self._lost.get(conversation_id, _ELSEWHERE))
        elif before and there and container_of(before) not in ("", there.id):
            there.tell(_ANOTHER)
            seen = None
        return PythonSession(self, conversation_id, options, seen)

    def id_of(self, conversation_id: str) -> str:
        """The id of the conversation's container; empty if it has none."""
        container = self._containers.get(conversation_id)
        return container.id if container is not None else ""

    async def run(
        self, conversation_id: str, code: str, owner: str = "", container_id: str = "", seen: str | None = None
    ) -> ToolResult:
        """Runs a cell in the conversation's notebook. Creates the notebook if needed, with the container id
        `container_id` if no other conversation has it. `seen`: as in `Container.run`."""
        if self.unavailable is not None or self._pool is None:
            reason = self.unavailable or "not started"
            return failed("unavailable", reason, f"[python is unavailable: {reason}]")
        if refused := self.refusal(conversation_id, owner):  # again: other calls started while this one waited
            return refused
        try:
            self._quotas.count_run(owner)
        except PythonQuotaError as error:
            return _refused(str(error), "resource_limit")
        if not self._has_room(conversation_id, owner):
            self._evict(self._idle(owner)[0], _ROOM_LOST)
        container = self._containers.get(conversation_id)
        if container is None:
            lost = self._lost.pop(conversation_id, "")
            if any(container_id == other.id for other in self._containers.values()):
                container_id = ""
            container = Container(self._pool, self._store, self.options, lost, owner, container_id)
            self._containers[conversation_id] = container
        try:
            return await container.run(code, seen)
        finally:
            self._pool.make_room()
            self._keep_memory()

    def refusal(self, conversation_id: str, owner: str) -> ToolResult | None:
        """The error of a call that needs one container more than its caller may have, while all of them are busy."""
        if self._has_room(conversation_id, owner) or self._idle(owner):
            return None
        limit = f"this caller may run {self._quotas.containers} python sessions at once, and all of them are busy"
        return _refused(limit, "resource_limit")

    def _has_room(self, conversation_id: str, owner: str) -> bool:
        limit, mine = self._quotas.containers, account(owner)
        held = {k for k, c in self._containers.items() if account(c.owner) == mine and (c.alive or c.lock.locked())}
        return not limit or conversation_id in held or len(held) < limit

    async def forget(self, conversation_id: str) -> None:
        """Ends a conversation now: its processes, its variables, its cage. Files copied out stay downloadable."""
        container = self._containers.pop(conversation_id, None)
        self._lost.pop(conversation_id, None)
        if container is not None:
            container.close()
            async with container.lock:
                await uninterrupted(container.discard(""))

    async def read_file(self, container_id: str, file_id: str) -> StoredFile | None:
        return await self._store.read(container_id, file_id)

    async def list_files(self, container_id: str) -> Sequence[StoredFile]:
        """Stored files that calls left in /mnt/data. Raises OSError if the file store fails."""
        return await self._store.listing(container_id)

    def _idle(self, owner: str | None = None) -> list[str]:
        """Conversations with a kernel and no call, of the caller `owner` or of all: first those of the owner who has
        most, the longest unused first."""
        alive = {key: c for key, c in self._containers.items() if c.alive}
        if owner is not None:
            alive = {key: c for key, c in alive.items() if account(c.owner) == account(owner)}
        held = Counter(c.owner for c in alive.values())
        idle = (key for key, c in alive.items() if not c.lock.locked())
        return sorted(idle, key=lambda key: (-held[alive[key].owner], alive[key].last_used))

    def _evict_idle(self) -> bool:
        for key in self._idle():
            self._evict(key, _ROOM_LOST)
            return True
        return False

    def _keep_memory(self) -> None:
        """Closes idle conversations while all together exceed the memory limit; spares the one used last."""
        held = sum(c.memory for c in self._containers.values())
        last = max(self._idle(), key=lambda key: self._containers[key].last_used, default="")
        for key in self._idle():
            if key == last:
                continue
            if held <= self.options.total_memory_mib << 20:
                return
            held -= self._containers[key].memory
            self._evict(key, _ROOM_LOST)

    def _remember_loss(self, conversation_id: str, lost: str) -> None:
        self._lost[conversation_id] = lost
        while len(self._lost) > _REMEMBERED:
            self._lost.popitem(last=False)

    def _evict(self, conversation_id: str, lost: str) -> None:
        container = self._containers.pop(conversation_id)
        self._remember_loss(conversation_id, lost)
        logger.info("python: closing container %s of an idle conversation", container.id)
        task = asyncio.create_task(container.discard(""))
        self._evictions.add(task)
        task.add_done_callback(self._evictions.discard)

    async def _sweep(self) -> None:
        interval = min(10.0, self.options.idle_s / 4)
        while True:
            await asyncio.sleep(interval)
            try:
                await self._store.prune()
            except Exception:
                logger.exception("python: old files could not be dropped")
            before = time.monotonic() - self.options.idle_s
            for key, container in list(self._containers.items()):
                if container.last_used < before and not container.lock.locked():
                    if container.alive:
                        self._evict(key, _IDLE_LOST)
                    else:
                        del self._containers[key]

    async def aclose(self) -> None:
        self.unavailable = "closed"
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        await asyncio.gather(*(self.forget(key) for key in list(self._containers)))
        await asyncio.gather(*self._evictions, return_exceptions=True)
        if self._pool is not None:
            await self._pool.aclose()
        self._store.close()


class PythonSession(ToolSession):
    """One request's view of its conversation's notebook."""

    def __init__(
        self, provider: PythonProvider, conversation_id: str, options: SessionOptions, seen: str | None
    ) -> None:
        """`seen`: the last call that the conversation has, as `last_call` returns it."""
        self._provider = provider
        self._owner = options.owner
        self._seen = seen
        self._anonymous = not conversation_id
        self._conversation_id = conversation_id or f"anonymous-{secrets.token_hex(16)}"
        self._id_of_new = options.new_container or new_container_id()

    @property
    def namespaces(self) -> Sequence[Namespace]:
        return self._provider.namespaces()

    @property
    def container_id(self) -> str:
        return self._provider.id_of(self._conversation_id) or self._id_of_new

    async def call(self, call: ToolCall) -> ToolResult:
        code = _code_of(call)
        if not code.strip():
            return _refused("the call carries no code")
        if len(code) > _MAX_CODE:
            return _refused(f"the code is longer than {_MAX_CODE} characters")
        fresh, self._id_of_new = self._id_of_new, new_container_id()
        result = await self._provider.run(self._conversation_id, code, self._owner, fresh, self._seen)
        self._seen = (result.recall or {}).get("call", self._seen)
        return result

    def refusal(self) -> ToolResult | None:
        return self._provider.refusal(self._conversation_id, self._owner)

    async def aclose(self) -> None:
        """Ends the request; the notebook stays for the conversation's next one, if it has a name to come back by."""
        if self._anonymous:
            await self._provider.forget(self._conversation_id)


def container_of(past: Sequence[Mapping[str, Any]]) -> str:
    """The container that the last of these calls that ran was in; empty where that is not known."""
    found = (str((call.get("recall") or {}).get("container") or "") for call in reversed(past))
    return next((container for container in found if container), "")


def _refused(reason: str, kind: str = "invalid_arguments") -> ToolResult:
    return failed(kind, reason, f"[not run: {reason}]")


def _code_of(call: ToolCall) -> str:
    """The code, also out of a Markdown fence, or of the JSON object `{"code": …}` that models write when they take
    python for a function."""
    text = call.arguments
    if text.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            value = json.loads(text)
            if isinstance(value, dict) and set(value) == {"code"} and isinstance(value["code"], str):
                logger.info("python call %s carried JSON; running its `code`", call.id)
                text = value["code"]
    return _without_fence(text)


def _without_fence(text: str) -> str:
    """The code of a text that is one Markdown fence, closed or not; other text as it is."""
    head, *lines = text.strip().split("\n")
    if head.strip().lower() not in ("```", "```python", "```python3", "```py"):
        return text
    if lines and lines[-1].strip() == "```":
        lines.pop()
    return text if any(line.lstrip().startswith("```") for line in lines) else "\n".join(lines)
