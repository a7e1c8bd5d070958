"""Builds one structural tag from the tools, tool choice and response format of a chat or Responses request of vLLM.

vLLM's own tags (`vllm/parser/harmony.py`) match text instead of tokens, allow one reasoning message at most, and cover
non-strict tools only on request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_gptoss import _vllm
from vllm_gptoss.server.chat.custom_tools import custom_of
from vllm_gptoss.server.harmony import grammar
from vllm_gptoss.server.harmony.enforce import compiling
from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError
from vllm_gptoss.server.harmony.held import Held
from vllm_gptoss.server.harmony.messages import FUNCTIONS, ResponseFormat
from vllm_gptoss.server.harmony.offered import OfferedTools

logger = logging.getLogger(__name__)

RESPONSE_FORMAT = "gptoss_response_format"
"""Request attribute with the answer's schema for the prompt, after `constrain` has replaced `response_format`."""

# Namespace and tools of the built-in tool types of vLLM's Responses handler.
_BUILT_IN = {
    "web_search_preview": ("browser", frozenset({"search", "open", "find"})),
    "code_interpreter": ("python", frozenset[str]()),
    "container": ("container", frozenset({"exec", "feed_chars"})),
}
HELD = "gptoss_held"
"""Request attribute with the parts that a grammar constrains, for the parser."""

_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")


def offered_tools(tools: Sequence[Any] | None) -> OfferedTools:
    """The recipients of a request's tools, which are tool objects of chat completions or Responses."""
    namespaces: dict[str, frozenset[str]] = {}
    if functions := frozenset(function.name for function in _functions(tools)):
        namespaces[FUNCTIONS] = functions
    namespaces.update(_BUILT_IN[tool.type] for tool in tools or () if tool.type in _BUILT_IN)
    customs = {f"{FUNCTIONS}.{f.name}": custom for f in _functions(tools) if (custom := custom_of(f))}
    raw = frozenset(name for name, custom in customs.items() if custom.grammar)
    return OfferedTools(namespaces, raw, frozenset(customs) - raw)


def _functions(tools: Sequence[Any] | None) -> list[Any]:
    return [getattr(tool, "function", tool) for tool in tools or () if tool.type in ("function", "custom")]


def constrain(request: Any, level: Any) -> Any:
    """Puts the structural tag into `request`, in place, if there is anything to constrain.

    `level` is vLLM's `ToolStrictLevel`; AUTO leaves calls of non-strict tools unconstrained under tool choice "auto".
    """
    if getattr(request, "continue_final_message", False):
        return request  # a tag begins with a header, which is in the prompt
    vllm = _vllm.harmony()
    level = level or vllm.ToolStrictLevel.AUTO
    params = request.extract_structured_outputs()
    room = compiling.Room()
    answer = _answer(request, params, vllm, room)
    calls, must_call = _calls(request, level, vllm, room)
    if must_call and answer:
        logger.warning("tool_choice demands a call: the response format is not applied to this turn.")
    if answer is None and not calls and request.tools and request.tool_choice == "none" and level:
        answer = grammar.FreeText()  # the prompt may show the tools: only the grammar keeps the model from calling
    tag = grammar.structural_tag(calls, must_call=must_call, answer=answer)
    if tag is None:
        return request
    shown = response_format(request)
    if params is None:
        request.structured_outputs = vllm.StructuredOutputsParams(structural_tag=tag)
    else:
        request.structured_outputs = replace(params, **dict.fromkeys(_CONSTRAINTS), structural_tag=tag)
    if hasattr(request, "response_format"):
        request.response_format = None
        setattr(request, RESPONSE_FORMAT, shown)
        setattr(request, HELD, Held(bool(calls), isinstance(answer, grammar.JSONArguments)))
    else:
        request.text = None
    return request


def _answer(request: Any, params: Any, vllm: Any, room: compiling.Room) -> grammar.Content | None:
    if params is None:
        return None
    if params.json_object:
        return grammar.JSONArguments()
    found = vllm.structured_outputs_to_format(params)
    if found is None:
        return None
    schema = getattr(found, "json_schema", None)
    if not isinstance(schema, Mapping):
        return grammar.Format(found.model_dump())
    named = getattr(getattr(request, "response_format", None), "json_schema", None)
    what = f"response_format '{getattr(named, 'name', 'json_schema')}'"
    return _held(schema, what, getattr(named, "strict", None), room)


def _held(schema: Mapping[str, Any], what: str, strict: bool | None, room: compiling.Room) -> grammar.JSONArguments:
    """JSON of `schema`, or any JSON if it has no grammar. Raises vLLM's validation error if `strict`."""
    try:
        compiling.grammar_of(schema, room)
    except NotEnforceableError as error:
        if strict:
            raise _vllm.harmony().ValidationError(
                f"Invalid schema for {what}: {error}. Leave 'strict' out to allow any JSON."
            ) from None
        compiling.tell(what, error)
        return grammar.any_json(schema)
    return grammar.JSONArguments(schema)


def _calls(request: Any, level: Any, vllm: Any, room: compiling.Room) -> tuple[list[grammar.Call], bool]:
    """The allowed calls, and whether one is required."""
    choice = request.tool_choice
    if not request.tools or choice == "none" or not vllm.is_strict():
        return [], False
    functions = _functions(request.tools)
    built_in = [tool for tool in request.tools if tool.type in _BUILT_IN]
    named = getattr(getattr(choice, "function", choice), "name", None)
    if named is not None:
        functions, built_in = [f for f in functions if f.name == named], []
    elif choice not in ("auto", "required", None):
        return [], False  # other choices of vLLM's Responses handler, which vLLM does not enforce either
    must_call = named is not None or choice == "required"
    is_strict = any(getattr(function, "strict", None) for function in functions)
    if not must_call and not is_strict and level == vllm.ToolStrictLevel.AUTO:
        return [], False
    pins_all = level == vllm.ToolStrictLevel.PARAMETER
    calls = [grammar.Call(f"{FUNCTIONS}.{f.name}", _arguments(f, pins_all, room)) for f in functions]
    for tool in built_in:
        namespace, names = _BUILT_IN[tool.type]
        calls += [grammar.Call(f"{namespace}.{name}") for name in sorted(names)]
        if not names:
            calls.append(grammar.Call(namespace, grammar.FreeText()))
    return calls, must_call and bool(calls)


def _arguments(function: Any, pins_all: bool, room: compiling.Room) -> grammar.Content:
    schema, strict = getattr(function, "parameters", None), getattr(function, "strict", None)
    custom = custom_of(function)
    if custom and custom.grammar:
        if custom.written is None:
            return grammar.FreeText()
        try:
            room.take(custom.written)
        except NotEnforceableError as error:
            raise _vllm.harmony().ValidationError(f"{error}.", parameter="tools") from None
        return grammar.EBNF(custom.written.grammar)
    if not schema or not (pins_all or strict or custom):
        return grammar.JSONArguments()
    return _held({"type": "object", **schema}, f"function '{function.name}'", strict, room)


def schemas(request: Any) -> list[Mapping[str, Any]]:
    """The schemas of a chat request that `constrain` will enforce, for `compiling.prepare_all`."""
    found = [
        {"type": "object", **function.parameters}
        for function in _functions(request.tools)
        if getattr(function, "strict", None) and getattr(function, "parameters", None)
    ]
    answer = getattr(getattr(getattr(request, "response_format", None), "json_schema", None), "json_schema", None)
    return [*found, *([answer] if isinstance(answer, Mapping) else [])]


def response_format(request: Any) -> ResponseFormat | None:
    """The JSON schema of a chat request's `response_format`, for the prompt."""
    found = getattr(getattr(request, "response_format", None), "json_schema", None)
    schema = getattr(found, "json_schema", None)
    if found is None or not isinstance(schema, dict):
        return None
    return ResponseFormat(found.name, schema, found.description or "")
