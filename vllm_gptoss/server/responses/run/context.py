"""The context that all responses of one server share."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_gptoss.server.responses.errors import ApiError
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.prompt.toolset import Providers
from vllm_gptoss.server.responses.request.templates import Templates
from vllm_gptoss.server.responses.run.engine import Engine
from vllm_gptoss.server.responses.state.caller import Caller
from vllm_gptoss.server.responses.state.sealing import KeyRing
from vllm_gptoss.server.responses.state.store import Store
from vllm_gptoss.server.responses.state.stored import StoreError
from vllm_gptoss.tools.protocol import ToolError

logger = logging.getLogger(__name__)

Models = Callable[[str | None], tuple[str, Any]]
"""From the `model` of a request to the name to answer with and its LoRA adapter; raises `ApiError` if unknown."""

MAX_CONTAINERS = 100_000
"""Containers with a known owner; the python tool deletes their files sooner."""


class ContainerOwners:
    """API key and conversation of each container of the python tool, shared by all servers of the store."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._owners: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._unwritten: set[str] = set()

    async def remember(self, container_id: str, tenant: str, notebook: str) -> None:
        """`notebook` is the conversation of the python tool that the container belongs to."""
        if self._owners.get(container_id) == (tenant, notebook) and container_id not in self._unwritten:
            return
        self._owners[container_id] = (tenant, notebook)
        while len(self._owners) > MAX_CONTAINERS:
            self._unwritten.discard(self._owners.popitem(last=False)[0])
        if self._store is None:
            return
        self._unwritten.add(container_id)  # until it is: the next call tries again
        try:
            await self._store.containers.put(container_id, tenant, notebook)
            self._unwritten.discard(container_id)
        except StoreError as error:
            logger.warning("Only this server can serve the files of container %s: %s", container_id, error)

    async def notebook(self, container_id: str, caller: Caller) -> str:
        """Key of the python state for a request's `container`: that of the conversation that used it, or a new one."""
        return await self.used(container_id, caller) or f"{caller.tenant}:container:{container_id}"

    async def used(self, container_id: str, caller: Caller) -> str | None:
        """Key of the container's python state; None where the container is not the caller's."""
        known = self._owners.get(container_id)
        if known is None and self._store is not None:
            known = await self._store.containers.get(container_id)
        return known[1] if known and known[0] == caller.tenant else None


LAST, TENANTS, LONGEST = 20, 256, 500
"""Tool errors of one API key, API keys, and characters of one message; the oldest are removed first."""


class ToolErrors:
    """The last errors of tools in this process, for the web page. An API key reads only the errors of its calls."""

    def __init__(self) -> None:
        self._last: dict[str, deque[dict[str, Any]]] = {}

    def add(self, tenant: str, tool: str, error: ToolError) -> None:
        """Keeps the error of a call that a response of `tenant` made."""
        message = error.message[:LONGEST].encode(errors="replace").decode()  # JSON cannot hold half a surrogate pair
        entry = {"created_at": int(time.time()), "tool": tool, "type": error.type, "message": message}
        self._last[tenant] = last = self._last.pop(tenant, deque(maxlen=LAST))
        last.append(entry)
        if len(self._last) > TENANTS:
            del self._last[next(iter(self._last))]

    def of(self, tenant: str) -> list[dict[str, Any]]:
        """The last errors of the tenant's calls, oldest first."""
        return [*self._last.get(tenant, ())]


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The parts of one server that every response uses. `store` is None if nothing is stored."""

    engine: Engine
    models: Models
    options: ResponsesOptions
    providers: Providers
    store: Store | None
    keys: KeyRing
    templates: Templates = field(default_factory=Templates)
    containers: ContainerOwners = field(default_factory=ContainerOwners)
    tool_errors: ToolErrors = field(default_factory=ToolErrors)

    def need_store(self, param: str) -> Store:
        """The store. Raises `ApiError` (`store_disabled`) naming `param` without one."""
        if self.store is None:
            raise ApiError("This server stores nothing.", param=param, code="store_disabled")
        return self.store
