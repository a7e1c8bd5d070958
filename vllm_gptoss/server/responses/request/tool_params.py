"""The `tools` and `tool_choice` of a request, checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from openai.types.responses.custom_tool import CustomTool
from openai.types.responses.function_tool import FunctionTool
from openai.types.responses.namespace_tool import NamespaceTool
from openai.types.responses.tool import CodeInterpreter, Mcp
from openai.types.responses.tool_choice_allowed import ToolChoiceAllowed
from openai.types.responses.tool_choice_custom import ToolChoiceCustom
from openai.types.responses.tool_choice_function import ToolChoiceFunction
from openai.types.responses.tool_choice_mcp import ToolChoiceMcp
from openai.types.responses.web_search_preview_tool import WebSearchPreviewTool
from openai.types.responses.web_search_tool import WebSearchTool
from pydantic import BaseModel

from vllm_gptoss.server.responses import ids
from vllm_gptoss.server.responses.errors import ApiError, unsupported
from vllm_gptoss.server.responses.request.validation import validate
from vllm_gptoss.tools.protocol import LABEL, RESERVED

WEB_SEARCH = frozenset({"web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"})
CODE_INTERPRETER = "code_interpreter"

MODELS: Mapping[str, type[BaseModel]] = {
    "function": FunctionTool,
    "custom": CustomTool,
    "namespace": NamespaceTool,
    "mcp": Mcp,
    CODE_INTERPRETER: CodeInterpreter,
    "web_search": WebSearchTool,
    "web_search_2025_08_26": WebSearchTool,
    "web_search_preview": WebSearchPreviewTool,
    "web_search_preview_2025_03_11": WebSearchPreviewTool,
}

MAX_TOOLS = 1024
"""Tools of one request, those inside namespaces counted: each is prompt and grammar."""
MAX_SCHEMA = 20_000
"""Properties and enumerated values of one schema, together. OpenAI allows 5,000 and 1,000."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


def parse_tools(raw: Any) -> list[dict[str, Any]]:
    """Checked tools as plain dicts. Raises `ApiError` naming `tools[i]…`."""
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise ApiError("'tools' must be a list.", param="tools", code="invalid_type")
    tools = [_parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(raw)]
    _check_unique(tools)
    if (count := sum(len(tool["tools"]) if tool["type"] == "namespace" else 1 for tool in tools)) > MAX_TOOLS:
        raise ApiError(f"{count} tools; at most {MAX_TOOLS} can be offered.", param="tools", code="invalid_value")
    return tools


def check_schema_size(schema: Any, where: str) -> None:
    """Bounds the size of a schema, which is rendered and compiled. Raises `ApiError` naming `where`."""
    count, waiting = 0, [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            for name in ("properties", "patternProperties", "enum"):
                inner = node.get(name)
                count += len(inner) if isinstance(inner, dict | list) else 0
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    if count > MAX_SCHEMA:
        message = f"Invalid '{where}': {count} properties and enumerated values; at most {MAX_SCHEMA} are read."
        raise ApiError(message, param=where, code="invalid_value")


def strict_names(tools: Any) -> frozenset[str]:
    """Functions with an explicit `strict: true`; other schemas are enforced as far as possible."""
    found = set()
    for tool in tools if isinstance(tools, list) else ():
        for one in (tool, *(tool.get("tools") or ())) if isinstance(tool, dict) else ():
            if isinstance(one, dict) and one.get("strict") is True and isinstance(one.get("name"), str):
                found.add(one["name"])
    return frozenset(found)


def _parse_tool(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str):
        raise ApiError(f"'{where}' must be an object with a 'type'.", param=f"{where}.type", code="invalid_type")
    tool: dict[str, Any] = dict(raw)
    kind = tool["type"]
    if kind not in MODELS:
        raise unsupported(f"{where}.type", f"tools of type '{kind}' cannot be offered to gpt-oss here")
    if kind == "function":
        tool = {"description": None, "parameters": None, "strict": True} | tool
        tool["strict"] = True if tool["strict"] is None else tool["strict"]
    validate(MODELS[kind], tool, where)
    if check := _CHECKS.get(kind):
        check(tool, where)
    if tool.pop("defer_loading", None):
        raise unsupported(f"{where}.defer_loading", "every tool is loaded at once")
    if tool.get("async"):
        raise unsupported(f"{where}.async", "calls are answered in order")
    if "programmatic" in (tool.get("allowed_callers") or ()):
        raise unsupported(f"{where}.allowed_callers", "only the model itself calls tools")
    return tool


def _check_named(tool: Mapping[str, Any], where: str) -> None:
    if not _NAME.fullmatch(tool["name"]):
        message = f"Invalid '{where}.name': letters, digits, '_' and '-' only, at most 128."
        raise ApiError(message, param=f"{where}.name", code="invalid_value")
    parameters = tool.get("parameters")
    if parameters is not None and parameters.get("type", "object") != "object":
        message = f"Invalid '{where}.parameters': a JSON schema of type 'object' is needed."
        raise ApiError(message, param=f"{where}.parameters", code="invalid_function_parameters")
    check_schema_size(parameters, f"{where}.parameters")


def _check_namespace(tool: Mapping[str, Any], where: str) -> None:
    _check_label(tool["name"], f"{where}.name")
    for index, inner in enumerate(tool["tools"]):
        _check_named(inner, f"{where}.tools[{index}]")


def _check_label(name: str, where: str) -> None:
    if not LABEL.fullmatch(name) or name in RESERVED:
        message = f"Invalid '{where}': '{name}' is reserved, or is not letters, digits, '_', '-' and '.'."
        raise ApiError(message, param=where, code="invalid_value")


def _check_mcp(tool: Mapping[str, Any], where: str) -> None:
    _check_label(tool["server_label"], f"{where}.server_label")
    for name in ("connector_id", "tunnel_id"):
        if tool.get(name):
            raise unsupported(f"{where}.{name}", "this is a service of OpenAI's; give a 'server_url'")


def _check_container(tool: Mapping[str, Any], where: str) -> None:
    container = tool["container"]
    if isinstance(container, str):
        if not ids.is_one(container):
            message = "A container's name is 1 to 128 printable characters."
            raise ApiError(message, param=f"{where}.container", code="invalid_value")
        return
    if container.get("file_ids"):
        raise unsupported(f"{where}.container.file_ids", "there is no Files API here; let the code write its files")
    if container.get("memory_limit"):
        raise unsupported(f"{where}.container.memory_limit", "the server's operator sets the limit")
    if (container.get("network_policy") or {}).get("type") == "allowlist":
        raise unsupported(f"{where}.container.network_policy", "the sandbox has no network")


_CHECKS = {
    "function": _check_named,
    "custom": _check_named,
    "namespace": _check_namespace,
    "mcp": _check_mcp,
    CODE_INTERPRETER: _check_container,
}


def identity(tool: Mapping[str, Any]) -> tuple[str, str]:
    """The identity of a tool: its type, and its name or label if the type has one."""
    kind = "web_search" if tool["type"] in WEB_SEARCH else tool["type"]
    return kind, tool.get("server_label") or tool.get("name") or ""


def _check_unique(tools: Iterable[Mapping[str, Any]]) -> None:
    seen: set[tuple[str, str]] = set()
    for index, tool in enumerate(tools):
        kind, name = identity(tool)
        # Functions and custom tools share one namespace in the prompt; so do namespaces and MCP servers.
        key = ({"custom": "function", "mcp": "namespace"}.get(kind, kind), name)
        if key in seen:
            raise ApiError(f"'{name or kind}' is given twice.", param=f"tools[{index}]", code="invalid_value")
        seen.add(key)


def check_tool_choice(choice: Any, tools: list[dict[str, Any]]) -> Any:
    """The choice as a word or a dict. Raises `ApiError` if it names a tool that is not there."""
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise ApiError(f"Invalid 'tool_choice': '{choice}'.", param="tool_choice", code="invalid_value")
        if choice == "required" and not tools:
            raise ApiError("'tool_choice' is 'required' but there are no tools.", param="tool_choice")
        return choice
    if not isinstance(choice, dict):
        raise ApiError("'tool_choice' must be a string or an object.", param="tool_choice", code="invalid_type")
    if choice.get("type") == "allowed_tools":
        allowed = validate(ToolChoiceAllowed, choice, "tool_choice")
        for index, entry in enumerate(allowed.tools):
            check_choice_exists(entry, tools, f"tool_choice.tools[{index}]")
        return choice
    check_choice_exists(choice, tools, "tool_choice")
    return choice


_CHOICES: Mapping[str, type[BaseModel]] = {
    "function": ToolChoiceFunction,
    "custom": ToolChoiceCustom,
    "mcp": ToolChoiceMcp,
}


def check_choice_exists(choice: Mapping[str, Any], tools: list[dict[str, Any]], where: str) -> None:
    """Raises `ApiError` naming `where`, unless `choice` is well formed and means one of `tools`."""
    kind = choice.get("type")
    if not isinstance(kind, str):
        raise ApiError(f"'{where}.type' must be a string.", param=f"{where}.type", code="invalid_type")
    if kind in _CHOICES:
        validate(_CHOICES[kind], choice, where)
    elif kind not in WEB_SEARCH and kind != CODE_INTERPRETER:
        raise unsupported(f"{where}.type", f"'{kind}' is not a tool that can be chosen here")
    if not any(matches(choice, tool) for tool in tools):
        name = choice.get("name") or choice.get("server_label") or kind
        raise ApiError(f"Tool choice '{name}' not found in 'tools'.", param=where, code="invalid_value")


def matches(choice: Mapping[str, Any], tool: Mapping[str, Any]) -> bool:
    """Whether `choice` means `tool`, or a tool inside it where that is a namespace."""
    if tool["type"] == "namespace":
        return any(matches(choice, inner) for inner in tool["tools"])
    kind, name = identity(tool)
    wanted = "web_search" if choice.get("type") in WEB_SEARCH else choice.get("type")
    return kind == wanted and (not name or name == (choice.get("server_label") or choice.get("name")))
