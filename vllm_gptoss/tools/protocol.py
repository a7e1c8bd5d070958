"""The interface between the server and tools: a tool's description, its calls and its results.

A *provider* is configured once per server and owns long-lived things (a warm kernel pool, an MCP connection, an index).
It opens a *session* per conversation, which owns the state the model sees (variables, page stack). Sessions never
raise for errors of a tool: a `ToolResult` with `error` set goes back to the model and to the client's item.

Every method a caller may use is named here, with a default for tools that do not need it; `tools/gate` forwards each.
"""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

logger = logging.getLogger(__name__)

LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
"""A namespace that the model can address, and so a `server_label`."""

ID = re.compile(r"[A-Za-z0-9_-]{0,80}")
"""A container's id, and an owner's in a tools service; empty where there is none."""

RESERVED = frozenset({"functions", "python", "browser", "container", "assistant", "user", "system", "developer"})
"""Names that mean something else in a Harmony header."""


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
    """Why a call failed. `type` is stable and machine-readable."""

    type: str  # invalid_arguments | unknown_tool | timeout | resource_limit | tool_failed | unavailable | denied
    message: str


@dataclass(frozen=True, slots=True)
class Source:
    """A page the browser opened, for `url_citation` annotations: `cursor` is the number that the model cites."""

    cursor: int
    url: str
    title: str
    quote: str = ""  # the first cited line, where the tool keeps it


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a container, as its client gets it. `data` is empty in listings."""

    container_id: str
    file_id: str
    filename: str  # relative to /mnt/data
    media_type: str
    size: int  # bytes
    created_at: int  # unix time, s
    data: bytes = b""
    owner: str = ""  # of the call that left it, as in `SessionOptions`


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
    recall: Mapping[str, Any] | None = None
    """JSON that later sessions of the conversation find in `SessionOptions.past`."""

    @property
    def text(self) -> str:
        parts = (
            c.text if isinstance(c, Text) else c.alt if isinstance(c, Image) else f"[file: {c.filename}]"
            for c in self.content
        )
        return "\n".join(parts)


CALLER: ContextVar[str] = ContextVar("gptoss_caller", default="")
"""The caller, for fair queues: set by the serving core, an API key's tenant. Empty: all are one."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """A request's options for its tools; a provider ignores the options of other tools."""

    response_id: str = ""
    owner: str = ""
    """The caller as a hash, for fair sharing. Empty where callers are not distinguished."""
    allowed_domains: Sequence[str] = ()
    external_web_access: bool = True
    search_context_size: str = "medium"
    allowed_tools: Sequence[str] | None = None
    user_location: Mapping[str, Any] = field(default_factory=dict)
    past: Sequence[Mapping[str, Any]] = ()
    """Calls of the conversation's earlier responses, of every process: `recipient`, `output`, `recall`."""
    knows_all: bool = False
    """Whether `past` has every call that the model will see; else nothing follows from one that is not there."""
    new_container: str = ""
    """The id of a container that has to be made for the conversation; empty: the tool chooses."""


class ToolSession(ABC):
    """One conversation's view of a provider. Calls of one session run one at a time."""

    @property
    @abstractmethod
    def namespaces(self) -> Sequence[Namespace]:
        """What this conversation may call."""

    @abstractmethod
    async def call(self, call: ToolCall) -> ToolResult:
        """Runs `call`. Raises only `asyncio.CancelledError`, after the tool stopped."""

    def refusal(self) -> ToolResult | None:
        """The error of a call that could not run now, so that it waits for no slot; None if a call may run."""
        return None

    @property
    def container_id(self) -> str:
        """The container that the next call runs in, where a session knows it before the call; else empty."""
        return ""

    def source(self, cursor: int, line: int | None = None) -> Source | None:
        """The page behind a citation's cursor, if this session opened it; `line` distinguishes search results."""
        return None

    async def aclose(self) -> None:
        """Ends the session. What the conversation shares stays with the provider."""
        return None


class ToolProvider(ABC):
    """One configured tool or MCP server."""

    honours_web_options = True
    """Whether `allowed_domains` and `external_web_access` of the session options have an effect."""

    longest_call_s = 90.0
    """Seconds after which a call is over by the tool's own limits; one that is not hangs."""

    at_once: int | None = None
    """How many calls it has room for at once, or None where it does not know."""

    note: str | None = None
    """A feature of the enabled tool that does not work, because it is not configured."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The namespace's name, known even while the tool is off."""

    @property
    @abstractmethod
    def unavailable(self) -> str | None:
        """Why this tool is off, or None. An unavailable provider is skipped, with one log line."""

    @abstractmethod
    def namespaces(self) -> Sequence[Namespace]:
        """What the prompt may show; empty while that is not known."""

    @abstractmethod
    async def open(self, conversation_id: str, options: SessionOptions) -> ToolSession:
        """The tool as one conversation sees it; an empty id is private and ends with the session."""

    async def start(self) -> None:
        """Connects or warms up. Failure sets `unavailable`; it never raises."""
        return None

    async def aclose(self) -> None:
        """Ends every session and all that they share."""
        return None

    @property
    def isolation(self) -> str:
        """How programs are held, as `name: what that means`; empty for a tool that runs none."""
        return ""

    def needs_approval(self, tool: str) -> bool:
        """Whether the operator wants a person to agree before each call of `tool`."""
        return False

    def trial(self) -> tuple[str, str] | None:
        """The call that the operator allows for trying the tool out: its tool and arguments."""
        return None

    async def list_files(self, container_id: str) -> Sequence[StoredFile]:
        """The files of a container that can be downloaded, oldest first."""
        return ()

    async def read_file(self, container_id: str, file_id: str) -> StoredFile | None:
        """A file with its bytes; None if it is unknown or expired."""
        return None


def last_call(past: Sequence[Mapping[str, Any]]) -> str | None:
    """The name that the last of these calls that ran gave itself; empty where none ran, None where it gave none."""
    recall = next((call["recall"] for call in reversed(past) if call.get("recall")), {"call": ""})
    return str(recall["call"]) if "call" in recall else None


def failed(kind: str, message: str, shown: str = "") -> ToolResult:
    """A result with `message` for the client, and `shown` or the same for the model; `kind`: `ToolError.type`."""
    return ToolResult([Text(shown or message)], ToolError(kind, message))


async def call_within(session: ToolSession, call: ToolCall, limit_s: float) -> ToolResult:
    """Runs `call` for at most `limit_s`. Every failure becomes a result.

    Raises only `asyncio.CancelledError`.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await session.call(call)
    except TimeoutError:
        return failed("timeout", f"The tool did not answer within {limit_s:g} s and was stopped.")
    except Exception as error:
        logger.exception("tool %s failed outside its contract", call.namespace)
        return failed("tool_failed", f"The tool failed: {type(error).__name__}")


# What gpt-oss was trained on, word for word: "Harmony response format", sections Browser tool and Python tool.


def python_namespace(timeout_s: float = 120.0) -> Namespace:
    """The python tool. Of the text, only the seconds that a call may take may be changed."""
    text = (
        "Use this tool to execute Python code in your chain of thought. The code will not be shown to the user. This"
        " tool should be used for internal reasoning, but not for code that is intended to be visible to the user"
        " (e.g. when creating plots, tables, or files).\n\n"
        "When you send a message containing Python code to python, it will be executed in a stateful Jupyter notebook"
        f" environment. python will respond with the output of the execution or time out after {timeout_s:.1f} seconds."
        " The drive at '/mnt/data' can be used to save and persist user files. Internet access for this session is"
        " UNKNOWN. Depends on the cluster."
    )
    return Namespace("python", ToolKind.PYTHON, text, ())


_NUMBER = {"type": "number", "default": -1}

BROWSER = Namespace(
    "browser",
    ToolKind.BROWSER,
    "Tool for browsing.\n"
    "The `cursor` appears in brackets before each browsing display: `[{cursor}]`.\n"
    "Cite information from the tool using the following format:\n"
    "`【{cursor}†L{line_start}(-L{line_end})?】`, for example: `【6†L9-L11】` or `【8†L3】`.\n"
    "Do not quote more than 10 words directly from the tool output.\n"
    "sources=web (default: web)",
    (
        ToolDefinition(
            "search",
            "Searches for information related to `query` and displays `topn` results.",
            {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "topn": {"type": "number", "default": 10},
                    "source": {"type": "string"},
                },
                "required": ["query"],
            },
        ),
        ToolDefinition(
            "open",
            "Opens the link `id` from the page indicated by `cursor` starting at line number `loc`, showing"
            " `num_lines` lines.\n"
            "Valid link ids are displayed with the formatting: `【{id}†.*】`.\n"
            "If `cursor` is not provided, the most recent page is implied.\n"
            "If `id` is a string, it is treated as a fully qualified URL associated with `source`.\n"
            "If `loc` is not provided, the viewport will be positioned at the beginning of the document or centered on"
            " the most relevant passage, if available.\n"
            "Use this function without `id` to scroll to a new location of an opened page.",
            {
                "type": "object",
                "properties": {
                    "id": {"type": ["number", "string"], "default": -1},
                    "cursor": _NUMBER,
                    "loc": _NUMBER,
                    "num_lines": _NUMBER,
                    "view_source": {"type": "boolean", "default": False},
                    "source": {"type": "string"},
                },
            },
        ),
        ToolDefinition(
            "find",
            "Finds exact matches of `pattern` in the current page, or the page given by `cursor`.",
            {
                "type": "object",
                "properties": {"pattern": {"type": "string"}, "cursor": _NUMBER},
                "required": ["pattern"],
            },
        ),
    ),
)
