"""Providers and sessions around others: these forward everything, so that a wrapper defines only what it changes."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_gptoss.tools.protocol import (
    Namespace,
    SessionOptions,
    Source,
    StoredFile,
    ToolCall,
    ToolProvider,
    ToolResult,
    ToolSession,
)


class WrapperSession(ToolSession):
    """`inner`, unchanged."""

    def __init__(self, inner: ToolSession) -> None:
        self.inner = inner

    @property
    def namespaces(self) -> Sequence[Namespace]:
        return self.inner.namespaces

    @property
    def container_id(self) -> str:
        return self.inner.container_id

    async def call(self, call: ToolCall) -> ToolResult:
        return await self.inner.call(call)

    def source(self, cursor: int, line: int | None = None) -> Source | None:
        return self.inner.source(cursor, line)

    async def aclose(self) -> None:
        await self.inner.aclose()


class WrapperProvider(ToolProvider):
    """`inner`, unchanged."""

    def __init__(self, inner: ToolProvider) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def unavailable(self) -> str | None:
        return self.inner.unavailable

    @property
    def honours_web_options(self) -> bool:
        return self.inner.honours_web_options

    @property
    def longest_call_s(self) -> float:
        return self.inner.longest_call_s

    @property
    def at_once(self) -> int | None:
        return self.inner.at_once

    @property
    def note(self) -> str | None:
        return self.inner.note

    @property
    def isolation(self) -> str:
        return self.inner.isolation

    def namespaces(self) -> Sequence[Namespace]:
        return self.inner.namespaces()

    async def start(self) -> None:
        await self.inner.start()

    async def open(self, conversation_id: str, options: SessionOptions) -> ToolSession:
        return await self.inner.open(conversation_id, options)

    async def aclose(self) -> None:
        await self.inner.aclose()

    def needs_approval(self, tool: str) -> bool:
        return self.inner.needs_approval(tool)

    def trial(self) -> tuple[str, str] | None:
        return self.inner.trial()

    async def list_files(self, container_id: str) -> Sequence[StoredFile]:
        return await self.inner.list_files(container_id)

    async def read_file(self, container_id: str, file_id: str) -> StoredFile | None:
        return await self.inner.read_file(container_id, file_id)
