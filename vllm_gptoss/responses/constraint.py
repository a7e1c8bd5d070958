"""What the engine must keep to: offered tools, their schemas, and the format of the answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm_gptoss import _vllm
from vllm_gptoss.harmony import grammar
from vllm_gptoss.responses.errors import ApiError
from vllm_gptoss.responses.request import CreateRequest
from vllm_gptoss.responses.resource import plain
from vllm_gptoss.responses.toolset import Kind, Route, Toolset

logger = logging.getLogger(__name__)


def structural_tag(request: CreateRequest, toolset: Toolset, *, strict_tools: bool = True) -> str | None:
    """vLLM's structural tag for this request as JSON, or None for free generation.

    Calls are kept to the offered tools and their schemas by default; `strict_tools=False` does so only where the
    request forces a call.
    """
    answer = _answer(request)
    forced = must_call(request)
    if not forced and not strict_tools and answer is None:
        return None
    calls = [grammar.Call(route.recipient, _content(route)) for route in toolset.routes.values()]
    if forced and not calls:
        raise ApiError("'tool_choice' forces a call, but no tool can be called.", param="tool_choice")
    return grammar.structural_tag(calls, must_call=forced, answer=answer)


def must_call(request: CreateRequest) -> bool:
    choice = request.tool_choice
    if isinstance(choice, str):
        return choice == "required"
    return bool(choice.get("type") != "allowed_tools" or choice.get("mode") == "required")


def _answer(request: CreateRequest) -> grammar.Content | None:
    form: Mapping[str, Any] = plain(request.text.format) if request.text and request.text.format else {"type": "text"}
    if form["type"] == "json_schema":
        return grammar.JSONArguments(form["schema"])
    return grammar.JSONArguments() if form["type"] == "json_object" else None


def _content(route: Route) -> grammar.Content:
    if route.kind is Kind.PYTHON:
        return grammar.FreeText()
    if route.kind is Kind.BROWSER:
        # A schema would also force the order of its properties, which need not be the one the model was trained to
        # write; arguments that do not fit come back to it as an error.
        return grammar.JSONArguments()
    if not route.grammar:
        return grammar.JSONArguments(_enforceable(route))
    if route.grammar["syntax"] == "regex":
        return grammar.Pattern(route.grammar["definition"])
    try:
        return grammar.EBNF(_vllm.lark_to_ebnf(route.grammar["definition"]))
    except ValueError as error:
        param = "tools"
        raise ApiError(f"The grammar of '{route.name}' is not understood: {error}", param=param) from None


def _enforceable(route: Route) -> Mapping[str, Any] | None:
    """The schema if the engine can enforce it. One that it cannot still allows any JSON object."""
    schema = dict(route.schema) if route.schema else {"type": "object", "properties": {}}
    if _vllm.schema_is_enforceable(schema):
        return schema
    logger.warning("The schema of %s is beyond what xgrammar enforces; any JSON object is accepted", route.recipient)
    return None
