"""The grammar of generation: offered tools, their schemas, and the format of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_gptoss.server.chat.custom_tools import text_grammar
from vllm_gptoss.server.harmony import grammar
from vllm_gptoss.server.harmony.enforce import compiling
from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError, NotNowError
from vllm_gptoss.server.responses.errors import ApiError
from vllm_gptoss.server.responses.prompt.toolset import Kind, Route, Toolset
from vllm_gptoss.server.responses.request.create import CreateRequest, plain


@dataclass(frozen=True)
class Constraints:
    """vLLM's structural tags as JSON, or None for free generation.

    first: of the first round, where `tool_choice` may force a call
    later: once a call was made, so that the model can answer
    answers: whether they hold the answer, too
    """

    first: str | None = None
    later: str | None = None
    answers: bool = False


async def constraints(request: CreateRequest, toolset: Toolset, *, strict_tools: bool = True) -> Constraints:
    """The grammars of this request.

    By default they allow calls of offered tools only, and for strict tools only arguments of their schemas. With
    `strict_tools=False` only requests that force a call have them.

    Raises:
        ApiError: a grammar, or a schema with `strict: true`, cannot be enforced; a call is forced without a tool.
    """
    room = compiling.Room()
    answer = await _answer(request, room)
    forced = must_call(request)
    if not forced and not strict_tools and answer is None:
        return Constraints()
    calls = [grammar.Call(route.recipient, await _content(route, request, room)) for route in toolset.routes.values()]
    if forced and not calls:
        raise ApiError("'tool_choice' forces a call, but no tool can be called.", param="tool_choice")
    holds = strict_tools or answer is not None
    later = grammar.structural_tag(calls, answer=answer) if holds else None
    first = grammar.structural_tag(calls, must_call=True, answer=answer) if forced else later
    return Constraints(first, later, answer is not None)


def must_call(request: CreateRequest) -> bool:
    """Whether `tool_choice` forces a call of some tool."""
    choice = request.tool_choice
    if isinstance(choice, str):
        return choice == "required"
    return bool(choice.get("type") != "allowed_tools" or choice.get("mode") == "required")


async def _answer(request: CreateRequest, room: compiling.Room) -> grammar.Content | None:
    form: Mapping[str, Any] = plain(request.text.format) if request.text and request.text.format else {"type": "text"}
    if form["type"] != "json_schema":
        return grammar.JSONArguments() if form["type"] == "json_object" else None
    try:
        room.take(await compiling.prepare(form["schema"]))
    except NotEnforceableError as error:
        if form.get("strict"):
            message = f"Invalid schema for response_format '{form['name']}': {error}."
            raise _refusal(error, message, "text.format.schema", "invalid_json_schema") from None
        compiling.tell(f"the answer '{form['name']}'", error)
        return grammar.any_json(form["schema"])
    return grammar.JSONArguments(form["schema"])


async def _content(route: Route, request: CreateRequest, room: compiling.Room) -> grammar.Content:
    """The grammar of a call's text."""
    if route.kind is Kind.PYTHON:
        return grammar.FreeText()
    if route.grammar:
        return await _grammar(route, room)
    if not route.strict or not route.schema:
        return grammar.JSONArguments()
    schema = {"type": "object", **route.schema}
    try:
        room.take(await compiling.prepare(schema))
    except NotEnforceableError as error:
        if route.name in request.strict_tools:
            message = f"Invalid schema for function '{route.name}': {error}. Send 'strict': false to allow any JSON."
            raise _refusal(error, message, "tools", "invalid_function_parameters") from None
        compiling.tell(route.recipient, error)
        return grammar.JSONArguments()
    return grammar.JSONArguments(schema)


async def _grammar(route: Route, room: compiling.Room) -> grammar.Content:
    assert route.grammar is not None
    try:
        found = await text_grammar(route.grammar)
        room.take(found)
        return grammar.EBNF(found.grammar)
    except ValueError as error:
        raise _refusal(error, f"The grammar of '{route.name}' is not understood: {error}", "tools") from None


def _refusal(error: ValueError, message: str, param: str, code: str | None = None) -> ApiError:
    """400 with `message`, or 503 where nothing is known about the schema or grammar yet."""
    if isinstance(error, NotNowError):
        return ApiError(str(error), param=param, status=503, kind="server_error", retry_after=error.retry_after)
    return ApiError(message, param=param, code=code)
