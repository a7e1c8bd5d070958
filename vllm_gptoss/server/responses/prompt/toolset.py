"""The tools of one request: their text in the prompt, the valid recipients, and the tool behind each recipient."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vllm_gptoss.server.harmony.messages import ToolNamespace
from vllm_gptoss.server.harmony.offered import OfferedTools
from vllm_gptoss.tools.protocol import Namespace, Source, ToolKind, ToolProvider, ToolSession

logger = logging.getLogger(__name__)

Remote = Callable[[Mapping[str, Any]], Awaitable[ToolProvider]]
"""Makes a provider from a request's `mcp` tool with a `server_url`; raises `ApiError` when that is not allowed."""


@dataclass(frozen=True, slots=True)
class Providers:
    """The tools this server has, and how to reach an MCP server that a request brings along."""

    configured: Sequence[ToolProvider] = ()
    remote: Remote | None = None

    def of_kind(self, kind: ToolKind) -> ToolProvider | None:
        for provider in self.configured:
            # A provider that is off may have no namespace; its name still is the kind.
            if provider.name == kind.value or any(n.kind is kind for n in provider.namespaces()):
                return provider
        return None

    def named(self, label: str) -> ToolProvider | None:
        for provider in self.configured:
            names = {n.name for n in provider.namespaces() if n.kind is ToolKind.MCP}
            if label == provider.name or label in names:
                return provider
        return None


class Kind(StrEnum):
    """The kind of tool that answers a call, and so the type of its item."""

    FUNCTION = "function"
    CUSTOM = "custom"
    PYTHON = "python"
    BROWSER = "browser"
    MCP = "mcp"


@dataclass(frozen=True, slots=True)
class Route:
    """The tool behind a recipient.

    raw: a custom tool that takes plain text, not JSON
    strict: the grammar enforces `schema`, not only JSON
    """

    kind: Kind
    recipient: str
    name: str
    namespace: str | None = None
    session: ToolSession | None = None
    needs_approval: bool = False
    raw: bool = False
    schema: Mapping[str, Any] | None = None
    grammar: Mapping[str, str] | None = None
    strict: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether this server runs it, not the client."""
        return self.session is not None

    @property
    def waits(self) -> bool:
        """Whether a call of it ends the turn: the client must answer or approve it."""
        return self.session is None or self.needs_approval


@dataclass(slots=True)
class Toolset:
    """The opened tools of a request. `close()` when the response ends."""

    routes: dict[str, Route] = field(default_factory=dict)
    system: list[ToolNamespace] = field(default_factory=list)
    developer: list[ToolNamespace] = field(default_factory=list)
    servers: list[tuple[Namespace, frozenset[str] | None]] = field(default_factory=list)
    sessions: list[ToolSession] = field(default_factory=list)
    owned: list[ToolProvider] = field(default_factory=list)

    @property
    def offered(self) -> OfferedTools:
        raw = [route.recipient for route in self.routes.values() if route.raw]
        return OfferedTools.of([*self.system, *self.developer], free_text=raw)

    def source(self, cursor: int, line: int | None = None) -> Source | None:
        """The page that a citation's cursor means."""
        for session in self.sessions:
            if source := session.source(cursor, line):
                return source
        return None

    async def close(self) -> None:
        closables: list[ToolSession | ToolProvider] = [*self.sessions, *self.owned]
        for closable in closables:
            try:
                await closable.aclose()
            except Exception:
                logger.exception("A tool did not close")
        self.sessions, self.owned = [], []


def needs_approval(policy: Any, name: str, annotations: Mapping[str, Any]) -> bool:
    """`require_approval` of an `mcp` tool: `always` when it is left out, as in OpenAI's API.

    In a filter with both `tool_names` and `read_only`, one match is enough for `always`, and `never` needs both.
    """
    if policy is None or isinstance(policy, str):
        return policy != "never"
    for verdict in ("always", "never"):
        rule = policy.get(verdict)
        if rule is None:
            continue
        fits = []
        if rule.get("tool_names") is not None:
            fits.append(name in rule["tool_names"])
        if rule.get("read_only") is not None:
            fits.append(rule["read_only"] == bool(annotations.get("readOnlyHint")))
        if fits and (any(fits) if verdict == "always" else all(fits)):
            return verdict == "always"
    return True
