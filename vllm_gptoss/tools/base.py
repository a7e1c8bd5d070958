"""The contract between the tool loop (`responses/loop`) and the tools it runs: python, browser and MCP servers.

A *provider* is configured once per server and owns long-lived things (a warm kernel pool, an MCP connection, an index).
It opens a *session* per conversation, which owns the state the model sees (variables, page stack). Sessions never
raise for what a tool did wrong: a `ToolResult` with `error` set goes back to the model and to the client's item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class ToolKind(StrEnum):
    """What the API calls a namespace's items."""

    PYTHON = "python"  # code_interpreter_call
    BROWSER = "browser"  # web_search_call
    MCP = "mcp"  # mcp_list_tools, mcp_call, mcp_approval_request


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """One callable of a namespace. `parameters` is a JSON schema of type object, or None for free text."""

    name: str
    description: str
    parameters: Mapping[str, Any] | None = None
    include_in_prompt: bool = True
    annotations: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Namespace:
    """What the prompt shows under one name: `python`, `browser`, or an MCP server's label."""

    name: str
    kind: ToolKind
    description: str
    tools: Sequence[ToolDefinition]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call that the model made.

    `tool` is None when the whole namespace is the tool (`to=python`). `arguments` is the text as generated: JSON
    for most tools, source code for python.
    """

    id: str
    namespace: str
    tool: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the model; for a browser page with its cursor and line numbers in it."""

    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """An image a tool made; the model reads `alt`, the client gets the bytes."""

    media_type: str
    data: bytes
    alt: str = "[image]"


@dataclass(frozen=True, slots=True)
class File:
    """A file that a tool left behind, fetchable under `/v1/containers/{container_id}/files/{file_id}`."""

    container_id: str
    file_id: str
    filename: str
    bytes: int


Content = Text | Image | File


@dataclass(frozen=True, slots=True)
class ToolError:
    """Why a call did not do what was asked. `type` is stable and machine-readable."""

    type: str  # invalid_arguments | unknown_tool | timeout | resource_limit | tool_failed | unavailable | denied
    message: str


@dataclass(frozen=True, slots=True)
class Source:
    """A page the browser opened, for `url_citation` annotations: `cursor` is the number that the model cites."""

    cursor: int
    url: str
    title: str


@dataclass(frozen=True, slots=True)
class BrowserAction:
    """What a browser call did, with cursors resolved to URLs: the `action` of a `web_search_call`."""

    type: str  # search | open_page | find_in_page
    query: str | None = None
    url: str | None = None
    pattern: str | None = None
    sources: Sequence[Source] = ()


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came back: `content` in order, and `error` when the call failed; the model reads the content either way."""

    content: Sequence[Content]
    error: ToolError | None = None
    action: BrowserAction | None = None
    container_id: str | None = None
    structured: Any = None
    recall: Mapping[str, Any] | None = (
        None  # JSON that later sessions of the conversation find in `SessionOptions.past`
    )

    @property
    def text(self) -> str:
        """Everything the model reads, joined by newlines."""
        parts = (
            c.text if isinstance(c, Text) else c.alt if isinstance(c, Image) else f"[file: {c.filename}]"
            for c in self.content
        )
        return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What one request asks of a tool, beyond its defaults; a provider ignores what is not its own."""

    response_id: str = ""
    allowed_domains: Sequence[str] = ()
    external_web_access: bool = True
    search_context_size: str = "medium"
    allowed_tools: Sequence[str] | None = None
    user_location: Mapping[str, Any] = field(default_factory=dict)
    past: Sequence[Mapping[str, Any]] = ()
    """Calls of the conversation's earlier responses, whatever process ran them: `recipient`, `output`, `recall`."""


class ToolSession(Protocol):
    """One conversation's view of a provider. Calls of one session run one at a time."""

    @property
    def namespaces(self) -> Sequence[Namespace]: ...

    async def call(self, call: ToolCall) -> ToolResult:
        """Runs `call`. Raises only `asyncio.CancelledError`, after the tool stopped."""
        ...

    def source(self, cursor: int, line: int | None = None) -> Source | None:
        """The page behind a citation's cursor, if this session opened it; `line` tells search results apart."""
        ...

    async def aclose(self) -> None: ...


class ToolProvider(Protocol):
    """One configured tool or MCP server."""

    @property
    def name(self) -> str: ...

    @property
    def unavailable(self) -> str | None:
        """Why this tool is off, or None. An unavailable provider is skipped, with one log line."""
        ...

    async def start(self) -> None:
        """Connects or warms up. Failure sets `unavailable`; it never raises."""
        ...

    def namespaces(self) -> Sequence[Namespace]: ...

    async def open(self, conversation_id: str, options: SessionOptions) -> ToolSession: ...

    async def aclose(self) -> None: ...
