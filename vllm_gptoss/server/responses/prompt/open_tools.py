"""Opens the tools of one request: from the request's `tools` and `tool_choice` to a `Toolset`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_gptoss.server.harmony.builtin import BROWSER, PYTHON, for_prompt
from vllm_gptoss.server.harmony.custom import INPUT_SCHEMA, description_of
from vllm_gptoss.server.harmony.messages import FUNCTIONS, ToolNamespace, ToolSpec
from vllm_gptoss.server.responses.errors import ApiError, unsupported
from vllm_gptoss.server.responses.prompt.toolset import Kind, Providers, Route, Toolset, needs_approval
from vllm_gptoss.server.responses.request.tool_params import CODE_INTERPRETER, WEB_SEARCH, matches
from vllm_gptoss.tools.protocol import (
    Namespace,
    SessionOptions,
    ToolCall,
    ToolDefinition,
    ToolKind,
    ToolProvider,
    ToolResult,
    ToolSession,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Opener:
    """Builds the `Toolset` of one request. `past` and `owner` as in `SessionOptions`.

    With `listings`, the conversation's `mcp_list_tools` items, no tool is opened: the toolset is for the prompt only.
    """

    providers: Providers
    response_id: str
    conversation: str
    notebook: Callable[[str], Awaitable[str]]
    past: Sequence[Mapping[str, Any]]
    owner: str
    listings: Sequence[Mapping[str, Any]] | None
    _set: Toolset = field(default_factory=Toolset)
    _functions: list[ToolSpec] = field(default_factory=list)

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
        grammar = _grammar(tool)
        schema = None if grammar else INPUT_SCHEMA
        route = Route(
            Kind.CUSTOM, recipient, name, label, raw=bool(grammar), schema=schema, grammar=grammar, strict=True
        )
        self._set.routes[recipient] = route
        return ToolSpec(name, description_of(description, grammar), schema)

    async def _session(self, provider: ToolProvider, where: str, **options: Any) -> ToolSession:
        if provider.unavailable:
            raise unsupported(where, f"the tool is off: {provider.unavailable}")
        if self.listings is not None:
            return _Shown(provider.namespaces())
        conversation = options.pop("conversation", self.conversation)
        try:
            known = SessionOptions(self.response_id, self.owner, past=self.past, knows_all=True, **options)
            session = await provider.open(conversation, known)
        except Exception as error:
            logger.exception("Tool %s did not open", provider.name)
            message = f"The tool '{provider.name}' could not be opened: {type(error).__name__}: {error}"
            raise ApiError(message, param=where, status=503, kind="server_error") from error
        self._set.sessions.append(session)
        return session

    async def _open_python(self, tool: Mapping[str, Any], where: str) -> None:
        provider = self.providers.of_kind(ToolKind.PYTHON)
        if provider is None:
            raise unsupported(where, "this server has no python tool; start it with --tool-server")
        container = tool["container"]
        named = {}
        if isinstance(container, str):
            named["conversation"] = await self.notebook(container)
        session = await self._session(provider, where, **named)
        for namespace in _of(session, ToolKind.PYTHON):
            shown = ToolNamespace(namespace.name, namespace.description or PYTHON.description)
            self._set.system.append(shown)
            self._set.routes[namespace.name] = Route(Kind.PYTHON, namespace.name, namespace.name, session=session)

    async def _open_browser(self, tool: Mapping[str, Any], where: str) -> None:
        provider = self.providers.of_kind(ToolKind.BROWSER)
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
        names, read_only = _filter(tool.get("allowed_tools"))
        operator: Callable[[str], bool] = lambda _: False  # noqa: E731
        if tool.get("server_url") and self.listings is not None:
            session: ToolSession = _Shown(_listed(self.listings, label))
        else:
            provider = await self._mcp_provider(tool, where)
            session = await self._session(provider, where, allowed_tools=tuple(names) if names is not None else None)
            operator = provider.needs_approval
        for namespace in _of(session, ToolKind.MCP):
            allowed_names = frozenset(
                t.name
                for t in namespace.tools
                if (names is None or t.name in names) and (not read_only or t.annotations.get("readOnlyHint"))
            )
            self._add_server(tool, namespace, allowed_names, session, operator)

    async def _mcp_provider(self, tool: Mapping[str, Any], where: str) -> ToolProvider:
        if tool.get("server_url"):
            if self.providers.remote is None:
                raise unsupported(f"{where}.server_url", "this server connects to no MCP servers that requests name")
            try:
                provider = await self.providers.remote(tool)
            except Exception as error:  # not allowed, or an invalid URL
                raise unsupported(f"{where}.server_url", str(error)) from error
            self._set.owned.append(provider)
            return provider
        label = tool["server_label"]
        if (known := self.providers.named(label)) is None:
            raise unsupported(f"{where}.server_label", f"no MCP server '{label}' is configured; give a 'server_url'")
        return known

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
            policy = "never"  # a server that the operator configured: the operator's own policy applies below
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
    """The tools that `tool_choice` allows: none for `none`, the named ones for one tool or `allowed_tools`."""
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


class _Shown(ToolSession):
    """Tools as the prompt shows them, without a session that could call them."""

    namespaces: Sequence[Namespace] = ()

    def __init__(self, namespaces: Sequence[Namespace]) -> None:
        self.namespaces = namespaces

    async def call(self, call: ToolCall) -> ToolResult:
        raise NotImplementedError


def _listed(listings: Sequence[Mapping[str, Any]], label: str) -> list[Namespace]:
    """The tools of the server `label` by the conversation's last `mcp_list_tools` item of it; none without one."""
    own = [item for item in listings if item["server_label"] == label]
    if not own:
        logger.info("The tools of MCP server %s are not counted: it is not connected for a count", label)
        return []
    tools = [
        ToolDefinition(t["name"], t.get("description") or "", t["input_schema"], annotations=t.get("annotations") or {})
        for t in own[-1]["tools"]
    ]
    return [Namespace(label, ToolKind.MCP, "", tools)]


def raw_recipients(tools: Sequence[Mapping[str, Any]], choice: Any) -> frozenset[str]:
    """Recipients of the custom tools that take plain text, not JSON."""
    spaces = [
        (tool["name"], tool["tools"]) if tool["type"] == "namespace" else (FUNCTIONS, [tool])
        for _, tool in allowed(tools, choice)
    ]
    return frozenset(f"{space}.{tool['name']}" for space, inner in spaces for tool in inner if _grammar(tool))


def _grammar(tool: Mapping[str, Any]) -> Mapping[str, str] | None:
    """The grammar that holds the input of a custom tool."""
    form = tool.get("format") if tool["type"] == "custom" else None
    return form if form and form["type"] == "grammar" else None


def _of(session: ToolSession, kind: ToolKind) -> list[Namespace]:
    return [namespace for namespace in session.namespaces if namespace.kind is kind]


def _check_web_options(provider: ToolProvider, tool: Mapping[str, Any], where: str) -> None:
    """Refuses options that a browser behind MCP ignores.

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
            raise unsupported(f"{where}.{field_name}", "this server's browser is an MCP server without this option")


def _filter(allowed_tools: Any) -> tuple[frozenset[str] | None, bool]:
    """`allowed_tools` of an `mcp` tool: names (None for all), and whether only those that change nothing."""
    if allowed_tools is None:
        return None, False
    if isinstance(allowed_tools, list):
        return frozenset(allowed_tools), False
    names = allowed_tools.get("tool_names")
    return (frozenset(names) if names is not None else None), bool(allowed_tools.get("read_only"))
