"""The tools of one request: what the prompt shows, which recipients count, and who answers each call."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vllm_gptoss.server.harmony.builtin import BROWSER, PYTHON, for_prompt
from vllm_gptoss.server.harmony.custom import INPUT_SCHEMA, description_of
from vllm_gptoss.server.harmony.messages import FUNCTIONS, ToolNamespace, ToolSpec
from vllm_gptoss.server.harmony.offered import OfferedTools
from vllm_gptoss.server.responses.errors import ApiError, unsupported
from vllm_gptoss.server.responses.request.tool_params import CODE_INTERPRETER, WEB_SEARCH, matches
from vllm_gptoss.tools.protocol import (
    Namespace,
    SessionOptions,
    Source,
    ToolKind,
    ToolProvider,
    ToolSession,
)

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
            # One that is off may show no namespace; its name still says what it would be.
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
    """Who answers a call, and as which item."""

    FUNCTION = "function"
    CUSTOM = "custom"
    PYTHON = "python"
    BROWSER = "browser"
    MCP = "mcp"


@dataclass(frozen=True, slots=True)
class Route:
    """Where a recipient leads.

    raw: a custom tool whose text the model writes without JSON around it
    strict: its arguments are held to `schema`, not only to JSON
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
        """Whether a call of it ends the turn, as the client has to answer or allow it."""
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


class Opener:
    """Builds the `Toolset` of one request."""

    def __init__(
        self,
        providers: Providers,
        response_id: str,
        conversation: str,
        notebook: Callable[[str], Awaitable[str]] | None = None,
        past: Sequence[Mapping[str, Any]] = (),
        owner: str = "",
    ) -> None:
        """`past`: what the conversation's earlier calls left, and `owner`: who asks, as in `SessionOptions`."""
        self._owner = owner
        self._notebook = notebook
        self._past = past
        self._providers = providers
        self._response = response_id
        self._conversation = conversation
        self._set = Toolset()
        self._functions: list[ToolSpec] = []

    async def open(self, tools: Sequence[Mapping[str, Any]], choice: Any) -> Toolset:
        """Raises `ApiError` naming the tool that is not there."""
        try:
            for index, tool in allowed(tools, choice):
                await self._open(tool, f"tools[{index}]")
        except BaseException:
            await self._set.close()
            raise
        if self._functions:
            self._set.developer.insert(0, ToolNamespace(FUNCTIONS, "", tuple(self._functions)))
        return self._set

    async def _open(self, tool: Mapping[str, Any], where: str) -> None:
        kind = tool["type"]
        if kind in ("function", "custom"):
            self._functions.append(self._own(tool, FUNCTIONS))
        elif kind == "namespace":
            specs = [self._own(inner, tool["name"]) for inner in tool["tools"]]
            self._set.developer.append(ToolNamespace(tool["name"], tool["description"], specs))
        elif kind == CODE_INTERPRETER:
            await self._open_python(tool, where)
        elif kind in WEB_SEARCH:
            await self._open_browser(tool, where)
        else:
            await self._open_mcp(tool, where)

    def _own(self, tool: Mapping[str, Any], namespace: str) -> ToolSpec:
        """A function or custom tool, which the client runs."""
        name, description = tool["name"], tool.get("description") or ""
        recipient = f"{namespace}.{name}"
        label = None if namespace == FUNCTIONS else namespace
        if tool["type"] == "function":
            schema = tool.get("parameters")
            strict = tool.get("strict") is not False
            self._set.routes[recipient] = Route(Kind.FUNCTION, recipient, name, label, schema=schema, strict=strict)
            return ToolSpec(name, description, schema)
        form = tool.get("format") or {"type": "text"}
        grammar = form if form["type"] == "grammar" else None
        schema = None if grammar else INPUT_SCHEMA
        route = Route(
            Kind.CUSTOM, recipient, name, label, raw=bool(grammar), schema=schema, grammar=grammar, strict=True
        )
        self._set.routes[recipient] = route
        return ToolSpec(name, description_of(description, grammar), schema)

    async def _session(self, provider: ToolProvider, where: str, **options: Any) -> ToolSession:
        if provider.unavailable:
            raise unsupported(where, f"the tool is off: {provider.unavailable}")
        conversation = options.pop("conversation", self._conversation)
        try:
            known = SessionOptions(self._response, self._owner, past=self._past, knows_all=True, **options)
            session = await provider.open(conversation, known)
        except Exception as error:
            logger.exception("Tool %s did not open", provider.name)
            message = f"The tool '{provider.name}' could not be opened: {type(error).__name__}: {error}"
            raise ApiError(message, param=where, status=503, kind="server_error") from error
        self._set.sessions.append(session)
        return session

    async def _open_python(self, tool: Mapping[str, Any], where: str) -> None:
        provider = self._providers.of_kind(ToolKind.PYTHON)
        if provider is None:
            raise unsupported(where, "this server has no python tool; start it with --tool-server")
        container = tool["container"]
        named = {}
        if isinstance(container, str):
            named["conversation"] = await self._notebook(container) if self._notebook else container
        session = await self._session(provider, where, **named)
        for namespace in _of(session, ToolKind.PYTHON):
            shown = ToolNamespace(namespace.name, namespace.description or PYTHON.description)
            self._set.system.append(shown)
            self._set.routes[namespace.name] = Route(Kind.PYTHON, namespace.name, namespace.name, session=session)

    async def _open_browser(self, tool: Mapping[str, Any], where: str) -> None:
        provider = self._providers.of_kind(ToolKind.BROWSER)
        if provider is None:
            raise unsupported(where, "this server has no browser tool; start it with --tool-server")
        _check_web_options(provider, tool, where)
        session = await self._session(
            provider,
            where,
            allowed_domains=tuple((tool.get("filters") or {}).get("allowed_domains") or ()),
            external_web_access=tool.get("external_web_access") is not False,
            search_context_size=tool.get("search_context_size") or "medium",
            user_location=tool.get("user_location") or {},
        )
        for namespace in _of(session, ToolKind.BROWSER):
            specs = for_prompt(namespace).tools or BROWSER.tools
            description = namespace.description or BROWSER.description
            self._set.system.append(ToolNamespace(namespace.name, description, specs))
            for spec in specs:
                recipient = f"{namespace.name}.{spec.name}"
                route = Route(Kind.BROWSER, recipient, spec.name, session=session, schema=spec.parameters)
                self._set.routes[recipient] = route

    async def _open_mcp(self, tool: Mapping[str, Any], where: str) -> None:
        label = tool["server_label"]
        if tool.get("server_url"):
            if self._providers.remote is None:
                raise unsupported(f"{where}.server_url", "this server connects to no MCP servers that requests name")
            try:
                provider = await self._providers.remote(tool)
            except Exception as error:  # not allowed, or a URL that is none
                raise unsupported(f"{where}.server_url", str(error)) from error
            self._set.owned.append(provider)
        elif (known := self._providers.named(label)) is None:
            raise unsupported(f"{where}.server_label", f"no MCP server '{label}' is configured; give a 'server_url'")
        else:
            provider = known
        names, read_only = _filter(tool.get("allowed_tools"))
        session = await self._session(provider, where, allowed_tools=tuple(names) if names is not None else None)
        for namespace in _of(session, ToolKind.MCP):
            allowed_names = frozenset(
                t.name
                for t in namespace.tools
                if (names is None or t.name in names) and (not read_only or t.annotations.get("readOnlyHint"))
            )
            self._add_server(tool, namespace, allowed_names, session, provider.needs_approval)

    def _add_server(
        self,
        tool: Mapping[str, Any],
        namespace: Namespace,
        names: frozenset[str],
        session: ToolSession,
        operator: Callable[[str], bool],
    ) -> None:
        label = tool["server_label"]
        policy = tool.get("require_approval")
        if policy is None and not tool.get("server_url"):
            policy = "never"  # a server that the operator configured: the operator's own rule is asked below
        specs = [spec for spec in for_prompt(namespace).tools if spec.name in names]
        description = tool.get("server_description") or namespace.description
        self._set.developer.append(ToolNamespace(label, description, specs))
        self._set.servers.append((Namespace(label, namespace.kind, description, namespace.tools), names))
        for definition in namespace.tools:
            if definition.name in names:
                recipient = f"{label}.{definition.name}"
                if recipient in self._set.routes:  # labels and tools may both have dots
                    raise unsupported("tools", f"two of them are called '{recipient}'")
                approval = needs_approval(policy, definition.name, definition.annotations)
                approval = approval or operator(definition.name)
                self._set.routes[recipient] = Route(
                    Kind.MCP,
                    recipient,
                    definition.name,
                    label,
                    session,
                    needs_approval=approval,
                    schema=definition.parameters,
                )


def allowed(tools: Sequence[Mapping[str, Any]], choice: Any) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """The tools that `tool_choice` leaves: none for `none`, only what it names for one tool or `allowed_tools`."""
    if choice == "none":
        return
    for index, tool in enumerate(tools):
        if isinstance(choice, str):
            yield index, tool
            continue
        wanted = choice["tools"] if choice.get("type") == "allowed_tools" else [choice]
        if tool["type"] == "namespace":
            inner = [t for t in tool["tools"] if any(matches(w, t) for w in wanted)]
            if inner:
                yield index, {**tool, "tools": inner}
        elif hits := [w for w in wanted if matches(w, tool)]:
            names = [w["name"] for w in hits if tool["type"] == "mcp" and w.get("name")]
            yield index, {**tool, "allowed_tools": names} if names else tool


def _of(session: ToolSession, kind: ToolKind) -> list[Namespace]:
    return [namespace for namespace in session.namespaces if namespace.kind is kind]


def _check_web_options(provider: ToolProvider, tool: Mapping[str, Any], where: str) -> None:
    """A browser behind MCP cannot be told what a request wants of it, so it must not be promised.

    Raises:
        ApiError: naming the field.
    """
    if provider.honours_web_options:
        return
    for field_name, asked in (
        ("filters.allowed_domains", (tool.get("filters") or {}).get("allowed_domains")),
        ("external_web_access", tool.get("external_web_access") is False),
    ):
        if asked:
            raise unsupported(f"{where}.{field_name}", "this server's browser is an MCP server, which cannot be told")


def _filter(allowed_tools: Any) -> tuple[frozenset[str] | None, bool]:
    """`allowed_tools` of an `mcp` tool: names (None for all), and whether only those that change nothing."""
    if allowed_tools is None:
        return None, False
    if isinstance(allowed_tools, list):
        return frozenset(allowed_tools), False
    names = allowed_tools.get("tool_names")
    return (frozenset(names) if names is not None else None), bool(allowed_tools.get("read_only"))


def needs_approval(policy: Any, name: str, annotations: Mapping[str, Any]) -> bool:
    """`require_approval` of an `mcp` tool, `always` when it is left out, as OpenAI's API has it.

    Where a filter names tools and says `read_only` too, either is enough for `always`, and `never` needs both.
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
