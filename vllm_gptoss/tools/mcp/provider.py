"""An MCP server as one configured tool. One named `python` or `browser` takes that built-in tool's place."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mcp import MCPError

from vllm_gptoss.tools.mcp.answers import HTTP_ERROR
from vllm_gptoss.tools.mcp.connection import (
    Connection,
    ConnectionLostError,
    Listing,
    ServerUnavailableError,
    SlowError,
    origin,
)
from vllm_gptoss.tools.mcp.convert import to_result
from vllm_gptoss.tools.mcp.settings import McpServerConfig
from vllm_gptoss.tools.mcp.transport import Dialer
from vllm_gptoss.tools.protocol import (
    LABEL,
    RESERVED,
    BrowserAction,
    Namespace,
    SessionOptions,
    Source,
    ToolCall,
    ToolDefinition,
    ToolKind,
    ToolProvider,
    ToolResult,
    ToolSession,
    failed,
)

logger = logging.getLogger(__name__)

_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_-]+")
_NOT_A_TOOL_NAME = re.compile(r"[^A-Za-z0-9_./-]+")
_MAX_NAME = 128
_DISPLAY = re.compile(r"\[(\d+)\] (.*?)(?: \((\S+)\))?\n\*\*viewing lines \[")
_OPENS = {"search": "search", "open": "open_page", "find": "find_in_page"}


def namespace_name(text: str, taken: Collection[str] = RESERVED) -> str:
    """A server's own name as a name that the model can call and a request can give as `server_label`.

    taken: names with another meaning
    """
    name = _NOT_A_NAME.sub("_", text).strip("_")[:_MAX_NAME] or "mcp"
    return f"mcp_{name}"[:_MAX_NAME] if name in taken or not LABEL.fullmatch(name) else name


def tool_names(tools: Sequence[str]) -> dict[str, str]:
    """The name that the model calls each tool by, to its own: characters that end a Harmony header become `_`."""
    names: dict[str, str] = {}
    for own in dict.fromkeys(tools):
        name = first = _NOT_A_TOOL_NAME.sub("_", own)[:_MAX_NAME].strip("./") or "tool"
        number = 1
        while name in names:
            number += 1
            name = f"{first}_{number}"
        names[name] = own
    return names


class McpProvider(ToolProvider):
    """`label` is the namespace's name; empty means what the server calls itself first, unless that is `taken`.

    A third party that could choose its name freely would become the python tool one day and be sent code.
    """

    honours_web_options = False  # MCP has no words for `filters` and `external_web_access` of a `web_search` tool

    def __init__(
        self, label: str, config: McpServerConfig, dialer: Dialer | None = None, *, taken: Collection[str] = ()
    ) -> None:
        self.config = config
        self.longest_call_s = config.timeout_s + config.connect_timeout_s
        self._taken = {*taken, *(RESERVED if config.kind == "mcp" else RESERVED - {*ToolKind})}
        self._label = label
        self._dialer = dialer or Dialer(config)
        self.connection = Connection(
            label or (origin(config.url) if config.url else config.command), self._dialer, on_listing=self._listed
        )
        self._namespace: Namespace | None = None
        self.own_names: Mapping[str, str] = {}
        self._sessions: set[McpSession] = set()

    @property
    def name(self) -> str:
        """The namespace's name, or what was configured while the server has not answered."""
        if self._namespace:
            return self._namespace.name
        return self._label or namespace_name(self.connection.label, self._taken)

    @property
    def unavailable(self) -> str | None:
        if self._namespace is None or not self.connection.up:
            return self.connection.problem
        return None if self._namespace.tools else "the server offers no tools"

    @property
    def per_conversation(self) -> bool:
        """Whether each conversation has a separate connection: servers of the old kind store state by connection."""
        if self.config.connections != "auto":
            return self.config.connections == "per_conversation"
        kind = self._namespace.kind if self._namespace else ToolKind.MCP
        return self.config.wire == "sse" or (kind is not ToolKind.MCP and self.config.wire != "stdio")

    async def start(self) -> None:
        await self.connection.start()

    def namespaces(self) -> Sequence[Namespace]:
        return (self._namespace,) if self._namespace else ()

    def needs_approval(self, tool: str) -> bool:
        return self.config.needs_approval(self.own_names.get(tool, tool))

    def trial(self) -> tuple[str, str] | None:
        wanted = self.config.check
        return (str(wanted.get("tool")), json.dumps(wanted.get("arguments") or {})) if wanted else None

    async def open(self, conversation_id: str, options: SessionOptions) -> McpSession:
        """The server as `conversation_id` sees it. Nothing is sent before the first call."""
        listing = self.connection.listing
        if listing and time.monotonic() - listing.listed_at > self.config.refresh_s:
            self.connection.refresh()
        session = McpSession(self, conversation_id, options)
        self._sessions.add(session)
        return session

    def closed(self, session: McpSession) -> None:
        self._sessions.discard(session)

    async def aclose(self) -> None:
        await asyncio.gather(*(session.aclose() for session in list(self._sessions)))
        await self.connection.aclose()

    def connect(self, conversation_id: str) -> Connection:
        """A connection of one conversation's own, which it names as upstream does."""
        headers = {**self._dialer.headers, "x-session-id": opaque(conversation_id)}
        dialer = replace(self._dialer, headers=headers)
        return Connection(self.name, dialer, reconnect=False)

    def _listed(self, listing: Listing) -> None:
        label = self._label or self._first_name(listing.name)
        kind = self._kind(label)
        allowed = self.config.allowed_tools
        offered = [tool for tool in listing.tools if allowed is None or tool.name in allowed]
        self.own_names = tool_names([tool.name for tool in offered])
        by_own = {tool.name: tool for tool in reversed(offered)}  # of two with one name, the first
        tools = tuple(_definition(name, by_own[own], listing, kind) for name, own in self.own_names.items())
        if renamed := [f"{own!r} as {name}" for name, own in self.own_names.items() if own != name]:
            logger.info("mcp %s: tools are offered under other names: %s", label, ", ".join(renamed))
        missing = set(allowed or ()) - set(by_own)
        if missing:
            logger.warning("mcp %s: allowed_tools names tools it does not have: %s", label, ", ".join(sorted(missing)))
        self._namespace = Namespace(label, kind, listing.instructions, tools)
        logger.info("mcp %s: %d tools over %s, protocol %s", label, len(tools), self.config.wire, listing.protocol)

    def _first_name(self, said: str) -> str:
        name = namespace_name(said, self._taken)
        if self._namespace is None or self._namespace.name == name:
            return name
        logger.warning("mcp %s: the server now calls itself %r; its first name stays", self._namespace.name, said)
        return self._namespace.name

    def _kind(self, name: str) -> ToolKind:
        if self.config.kind != "auto":
            return ToolKind(self.config.kind)
        return ToolKind(name) if name in (ToolKind.PYTHON, ToolKind.BROWSER) else ToolKind.MCP


def _refusal(error: MCPError) -> str:
    data = error.error.data
    status = data.get("http_status") if error.error.code == HTTP_ERROR and isinstance(data, dict) else None
    return "denied" if status in (401, 403) else "unavailable" if status in (429, 503) else "tool_failed"


def opaque(conversation_id: str) -> str:
    """A name for the conversation that reveals nothing else to a third party."""
    return hashlib.sha256(conversation_id.encode()).hexdigest()[:32]


def _definition(name: str, tool: Any, listing: Listing, kind: ToolKind) -> ToolDefinition:
    shown = (tool.meta or {}).get("include_in_prompt", True) is not False and tool.name not in listing.hidden
    annotations = tool.annotations.model_dump(by_alias=True, exclude_none=True) if tool.annotations else {}
    # gpt-oss was trained on a python tool without a schema: text in, text out.
    in_prompt = shown and kind is not ToolKind.PYTHON
    return ToolDefinition(name, tool.description or "", tool.input_schema, in_prompt, annotations)


class McpSession(ToolSession):
    def __init__(self, provider: McpProvider, conversation_id: str, options: SessionOptions) -> None:
        self._provider = provider
        self._conversation = conversation_id or options.response_id
        self._options = options
        self._own: Connection | None = None
        shown = (call["recall"] for call in options.past if _is_display(call))
        self._sources = {memo["cursor"]: Source(memo["cursor"], memo["url"], memo["title"]) for memo in shown}

    @property
    def namespaces(self) -> Sequence[Namespace]:
        allowed = self._options.allowed_tools
        found = self._provider.namespaces()
        if allowed is None:
            return found
        return [replace(n, tools=[tool for tool in n.tools if tool.name in allowed]) for n in found]

    async def call(self, call: ToolCall) -> ToolResult:
        """Runs `call` on the server; its absence, slowness or death comes back as an error."""
        config = self._provider.config
        try:
            tool, arguments = self._request(call)
        except ValueError as error:
            return failed("invalid_arguments", str(error))
        meta = self._meta()
        try:
            connection = await self._connection()
            answer = await connection.call(self._provider.own_names.get(tool, tool), arguments, meta, config.timeout_s)
        except ServerUnavailableError as error:
            return failed("unavailable", f"The server of this tool cannot be reached: {error}. Nothing was run.")
        except ConnectionLostError as error:
            return failed("tool_failed", f"The connection to the tool broke ({error}). The call may have run.")
        except SlowError as error:
            return failed("timeout", f"The tool gave {error} and the call was cancelled.")
        except MCPError as error:
            return failed(_refusal(error), f"The tool's server refused the call: {error.error.message}")
        except RuntimeError as error:  # the SDK's word for results that break the tool's own output schema
            return failed("tool_failed", f"The tool's answer was not valid: {error}")
        return self._browsed(call, arguments, self._result(answer))

    def _meta(self) -> dict[str, Any]:
        return {"client_id": opaque(self._conversation)} if self._conversation else {}

    def _result(self, answer: Any) -> ToolResult:
        return to_result(answer, self._provider.config.max_output_chars)

    def source(self, cursor: int, line: int | None = None) -> Source | None:
        return self._sources.get(cursor)

    async def aclose(self) -> None:
        """Ends the conversation's own connection, if it had one."""
        self._provider.closed(self)
        if self._own is not None:
            own, self._own = self._own, None
            await own.aclose()

    async def _connection(self) -> Connection:
        if not self._provider.per_conversation:
            return self._provider.connection
        if self._own is None or not self._own.up:
            if self._own is not None:
                await self._own.aclose()
            self._own = self._provider.connect(self._conversation)
            await self._own.start()
        return self._own

    def _request(self, call: ToolCall) -> tuple[str, dict[str, Any]]:
        namespace = next(iter(self.namespaces), None)
        tools = namespace.tools if namespace else ()
        if namespace and namespace.kind is ToolKind.PYTHON and (call.tool is None or len(tools) == 1):
            return _code_call(tools, call.arguments)
        if call.tool is None:
            raise ValueError(f"say which tool of {call.namespace}: {', '.join(tool.name for tool in tools)}")
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError as error:
            raise ValueError(f"the arguments are not JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise ValueError("the arguments must be a JSON object")
        return call.tool, arguments

    def _browsed(self, call: ToolCall, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        namespace = next(iter(self._provider.namespaces()), None)
        if namespace is None or namespace.kind is not ToolKind.BROWSER or result.error or call.tool not in _OPENS:
            return result
        url = None
        recall = None
        if match := _DISPLAY.match(result.text):
            cursor, title, url = int(match[1]), match[2], match[3]
            if url:
                url = url.split("/find?pattern=", 1)[0]
                self._sources[cursor] = Source(cursor, url, title)
                recall = {"cursor": cursor, "url": url, "title": title}
        if url is None and isinstance(arguments.get("id"), str):
            url = arguments["id"]
        query = arguments.get("query") if call.tool == "search" else None
        pattern = arguments.get("pattern") if call.tool == "find" else None
        action = BrowserAction(_OPENS[call.tool], query=query, url=url, pattern=pattern)
        return replace(result, action=action, recall=recall)


def _is_display(call: Mapping[str, Any]) -> bool:
    memo = call.get("recall") or {}
    return str(call.get("recipient", "")).startswith(f"{ToolKind.BROWSER}.") and bool(memo.get("url"))


def _code_call(tools: Sequence[ToolDefinition], code: str) -> tuple[str, dict[str, Any]]:
    """The one tool of a python server, given the source code under the name of its one string parameter."""
    tool = next((t for t in tools if t.name == "python"), tools[0] if tools else None)
    if tool is None:
        raise ValueError("the python server offers no tool")
    properties = (tool.parameters or {}).get("properties", {})
    name = "code" if "code" in properties else next(iter(properties), "code")
    return tool.name, {name: code}
