"""Tools for tests: they implement tools/protocol.py and do what the test configures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from vllm_gptoss.tools.protocol import (
    BrowserAction,
    Namespace,
    SessionOptions,
    Source,
    Text,
    ToolCall,
    ToolDefinition,
    ToolError,
    ToolKind,
    ToolProvider,
    ToolResult,
    ToolSession,
)

Answer = Callable[[ToolCall], Awaitable[ToolResult]]

PYTHON = Namespace("python", ToolKind.PYTHON, "Runs code.", [])
BROWSER = Namespace(
    "browser",
    ToolKind.BROWSER,
    "Browses.",
    [
        ToolDefinition("search", "Searches.", {"type": "object", "properties": {"query": {"type": "string"}}}),
        ToolDefinition("open", "Opens.", {"type": "object", "properties": {"id": {"type": "number"}}}),
    ],
)
MCP = Namespace(
    "weather",
    ToolKind.MCP,
    "Weather of the world.",
    [
        ToolDefinition(
            "lookup",
            "Looks weather up.",
            {"type": "object", "properties": {"city": {"type": "string"}}},
            annotations={"readOnlyHint": True},
        ),
        ToolDefinition("erase", "Erases weather.", {"type": "object", "properties": {}}),
    ],
)
PAGE = Source(0, "https://example.com/page", "Example page", "cats purr " * 30)


class FakeSession(ToolSession):
    def __init__(self, provider: FakeProvider) -> None:
        self._provider = provider

    @property
    def namespaces(self) -> Sequence[Namespace]:
        return self._provider.namespaces()

    @property
    def container_id(self) -> str:
        return self._provider.container_id

    async def call(self, call: ToolCall) -> ToolResult:
        self._provider.calls.append(call)
        try:
            return await self._provider.answer(call)
        except asyncio.CancelledError:
            self._provider.cancelled += 1
            raise

    def source(self, cursor: int, line: int | None = None) -> Source | None:
        return PAGE if self._provider.name == "browser" and cursor == PAGE.cursor else None

    async def aclose(self) -> None:
        self._provider.closed += 1


class FakeProvider(ToolProvider):
    """`answer` may raise, hang, or return what it likes. `calls`, `opened` and `closed` show what happened."""

    name = ""
    unavailable: str | None = None
    container_id = ""
    honours_web_options = True

    def __init__(self, namespace: Namespace, answer: Answer) -> None:
        self.name = namespace.name
        self.answer = answer
        self.calls: list[ToolCall] = []
        self.opened: list[tuple[str, SessionOptions]] = []
        self.closed = 0
        self.cancelled = 0
        self._namespace = namespace

    def namespaces(self) -> Sequence[Namespace]:
        return [self._namespace]

    async def open(self, conversation_id: str, options: SessionOptions) -> FakeSession:
        self.opened.append((conversation_id, options))
        return FakeSession(self)


def python(answer: Answer | None = None) -> FakeProvider:
    async def run(call: ToolCall) -> ToolResult:
        return ToolResult([Text(f"ran {call.arguments}")], container_id="cntr_1")

    return FakeProvider(PYTHON, answer or run)


def browser() -> FakeProvider:
    async def browse(call: ToolCall) -> ToolResult:
        if call.tool == "search":
            action = BrowserAction("search", query="cats", sources=[PAGE])
            return ToolResult([Text("[0] Example page\nL1: cats purr")], action=action)
        return ToolResult([Text("[0] page")], action=BrowserAction("open_page", url=PAGE.url))

    return FakeProvider(BROWSER, browse)


def mcp(*, fails: bool = False) -> FakeProvider:
    async def answer(call: ToolCall) -> ToolResult:
        error = ToolError("tool_failed", "no such city") if fails else None
        return ToolResult([Text("no such city" if fails else "sunny")], error)

    return FakeProvider(MCP, answer)
