"""POST /v1/messages: prepares the request, then calls vLLM's handler.

A thinking budget becomes a reasoning effort, and grammars of large schemas are written in a confined worker. A
`tool_choice` without such a tool, and an answer schema without a grammar, return 400; vLLM's handler ignores both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from vllm_gptoss._vllm import messages
from vllm_gptoss.server.chat.chat_request import render_chat_early
from vllm_gptoss.server.chat.early import ONLY_COUNTED, is_long, settle
from vllm_gptoss.server.chat.messages_content import ContentReader, known_blocks
from vllm_gptoss.server.chat.vllm_parser import NEEDS_OBJECTS
from vllm_gptoss.server.harmony.enforce import compiling
from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError, NotNowError
from vllm_gptoss.server.harmony.messages import Effort
from vllm_gptoss.server.http import routes

logger = logging.getLogger(__name__)

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"

BUDGETS = ((4_096, Effort.LOW), (16_384, Effort.MEDIUM))
"""Upper bounds of thinking tokens per effort; from the last bound on the effort is high."""

_told: set[Effort] = set()


def replace_route(app: FastAPI) -> bool:
    """Adds our routes; vLLM then removes its own of the same paths. False if vLLM has no such route."""
    found = routes.posts(app)
    if PATH not in found:
        return False
    answers = found[PATH].endpoint

    async def create_messages(request: Any, raw_request: Request) -> Any:
        try:
            why = _impossible(request) or await ContentReader().read(request) or await _prepare(request)
        except NotNowError as error:
            return _error("overloaded_error", str(error), 503, error.headers)
        if why:
            return _error("invalid_request_error", why, 400)
        if not _has_budgets(raw_request):
            request = with_effort(request)
        NEEDS_OBJECTS.set(True)  # for this request's task
        try:
            await _render_early(request, raw_request)
        except HTTPException as error:
            kind = "rate_limit_error" if error.status_code == 429 else "invalid_request_error"
            return _error(kind, error.detail, error.status_code)
        return await answers(request, raw_request)

    async def count_tokens(request: Any, raw_request: Request) -> Any:
        if why := _impossible(request) or await ContentReader().read(request):
            return _error("invalid_request_error", why, 400)
        ONLY_COUNTED.set(True)  # for this request's task
        await _render_early(request, raw_request, counts=True)
        return await found[COUNT].endpoint(request, raw_request)

    vllm = messages.bodies()
    for path, ours, base in ((PATH, create_messages, vllm.Request), (COUNT, count_tokens, vllm.CountRequest)):
        if core := found.get(path):
            routes.add_beside(app, core, ours, routes.body_class(base, known_blocks))
    return True


def _error(kind: str, message: str, status: int, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"type": "error", "error": {"type": kind, "message": message}}, status, headers)


async def _render_early(request: Any, raw_request: Request, *, counts: bool = False) -> None:
    """Renders a long prompt before vLLM's handler converts this request to a chat request and needs it."""
    handler = getattr(raw_request.app.state, "anthropic_serving_messages", None)
    if handler is None or not is_long(raw_request):
        return
    try:
        chat = messages.as_chat(handler, request)
        settle(chat.messages)
    except Exception:  # the handler meets the same error and reports it in its API's format
        return
    await render_chat_early(chat, raw_request, counts=counts)


def with_effort(request: Any) -> Any:
    """A copy of `request` with an effort instead of its thinking budget; an effort in the request is not changed.

    Efforts are how gpt-oss was trained. vLLM ends reasoning after a number of tokens only with `--reasoning-config`,
    and otherwise rejects a budget.
    """
    vllm = messages.bodies()
    budget = getattr(request.thinking, "budget_tokens", None)
    if budget is None:
        return request
    effort = next((effort for below, effort in BUDGETS if budget < below), Effort.HIGH)
    output = request.output_config or vllm.OutputConfig()
    if output.effort is None:
        output = output.model_copy(update={"effort": effort.value})
        _say(budget, effort)
    return request.model_copy(update={"thinking": vllm.Adaptive(type="adaptive"), "output_config": output})


def _say(budget: int, effort: Effort) -> None:
    if effort not in _told:
        _told.add(effort)
        logger.info(
            "/v1/messages: a thinking budget of %d tokens is reasoning effort %s, and no limit (logged once).",
            budget,
            effort.value,
        )


def _has_budgets(raw_request: Request) -> bool:
    """Whether vLLM enforces thinking budgets (`--reasoning-config`)."""
    config = getattr(getattr(raw_request.app.state, "engine_client", None), "vllm_config", None)
    return bool(getattr(getattr(config, "reasoning_config", None), "enabled", False))


def _impossible(request: Any) -> str | None:
    """Why no answer to `request` is possible, or None."""
    if not request.messages:
        return "messages: at least one message is needed."
    choice = request.tool_choice
    if choice is None or choice.type not in ("any", "tool"):
        return None
    names = {tool.name for tool in _tools(request)}
    if not names:
        return f"tool_choice.type: {choice.type!r} needs tools."
    if choice.type == "tool" and choice.name not in names:
        return f"tool_choice.name: there is no tool {choice.name[:80]!r} in tools."
    return None


async def _prepare(request: Any) -> str | None:
    """Writes the grammars of the request. Returns why the answer's schema has none, or None."""
    await compiling.prepare_all({"type": "object", **tool.input_schema} for tool in _tools(request) if tool.strict)
    answer = getattr(getattr(request.output_config, "format", None), "json_schema", None)
    if answer is None:
        return None
    try:
        await compiling.prepare(answer)
    except NotNowError:
        raise
    except NotEnforceableError as error:
        return f"output_config.format.schema: {error}. Leave 'format' out, or that part of the schema."
    return None


def _tools(request: Any) -> Iterator[Any]:
    """All tools of a request, including those added by messages in the middle of a conversation."""
    yield from request.tools or ()
    for message in request.messages:
        if not isinstance(message.content, str):
            found = (getattr(block.tool, "definition", None) for block in message.content if block.tool is not None)
            yield from (tool for tool in found if tool is not None)
