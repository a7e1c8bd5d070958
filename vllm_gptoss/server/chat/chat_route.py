"""POST /v1/chat/completions with `allowed_tools` and custom tools, which vLLM's request model does not accept.

vLLM lets an endpoint plugin replace a route of the same path. Our routes rewrite the body, render long prompts in
threads, and then call vLLM's own route.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from vllm_gptoss import _vllm
from vllm_gptoss.server.chat import custom_tools
from vllm_gptoss.server.chat.chat_options import checked
from vllm_gptoss.server.chat.chat_request import render_chat_early
from vllm_gptoss.server.chat.early import is_long, settle
from vllm_gptoss.server.chat.vllm_constraint import schemas
from vllm_gptoss.server.harmony.enforce import compiling
from vllm_gptoss.server.harmony.enforce.errors import NotNowError
from vllm_gptoss.server.http import routes
from vllm_gptoss.server.streaming.fast_frames import go_straight

PATH, BATCH = "/v1/chat/completions", "/v1/chat/completions/batch"


def replace_route(app: FastAPI) -> bool:
    """Adds our routes; vLLM then removes its own of the same paths. False if vLLM has no such route."""
    found = routes.posts(app)
    if PATH not in found:
        return False

    async def create_chat_completion(request: Any, raw_request: Request) -> Any:
        try:
            await compiling.prepare_all(schemas(request))
            customs = await custom_tools.prepare(request)
        except NotNowError as error:
            return _busy(error)
        settle(request.messages)
        await render_chat_early(request, raw_request)
        response = await found[PATH].endpoint(request, raw_request)
        return custom_tools.with_custom_calls(response, customs) if customs else go_straight(response)

    async def create_batch(request: Any, raw_request: Request) -> Any:
        for messages in request.messages:
            settle(messages)
        try:  # all conversations have the same schema
            await compiling.prepare_all(schemas(request.to_chat_completion_request(request.messages[0])))
        except NotNowError as error:
            return _busy(error)
        for messages in request.messages if is_long(raw_request) else ():
            await render_chat_early(request.to_chat_completion_request(messages), raw_request)
        return await found[BATCH].endpoint(request, raw_request)

    chat, batch = _vllm.chat_requests()
    routes.add_beside(app, found[PATH], create_chat_completion, routes.body_class(chat, as_vllm_reads))
    if BATCH in found:
        routes.add_beside(app, found[BATCH], create_batch, routes.body_class(batch, checked))
    return True


def _busy(error: NotNowError) -> JSONResponse:
    body = {"message": str(error), "type": "server_error", "param": None, "code": 503}
    return JSONResponse({"error": body}, 503, error.headers)


def as_vllm_reads(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body of a chat request in the form that vLLM's request model accepts."""
    return custom_tools.as_functions(without_allowed_tools(checked(data)))


def without_allowed_tools(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body with only the tools of its `allowed_tools`, and their mode as `tool_choice`.

    Raises:
        vLLM's validation error (400): an invalid mode, or a tool that is not in `tools`.
    """
    choice = data.get("tool_choice")
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return data
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, Mapping) or allowed.get("mode") not in ("auto", "required"):
        raise _invalid("needs `allowed_tools` with a `mode`, auto or required", "mode")
    names = _names(allowed.get("tools"))
    if not names:
        raise _invalid("names no tool", "tools")
    given = data.get("tools")
    tools = {_name(tool): tool for tool in given or ()} if isinstance(given, Sequence) else {}
    if missing := [name for name in names if name not in tools]:
        raise _invalid(f"names {missing[0]!r}, which is not in `tools`", "tools")
    kept = [tool for name, tool in tools.items() if name in names]
    return {**data, "tools": kept, "tool_choice": allowed["mode"]}


def _names(entries: Any) -> list[str]:
    found = [_name(entry) for entry in entries] if isinstance(entries, Sequence) else []
    if None in found:
        raise _invalid('lists tools as `{"type": "function", "function": {"name": …}}`', "tools")
    return cast(list[str], found)


def _name(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return custom_tools.name_of(tool, kind) if kind in ("function", "custom") else None


def _invalid(what: str, field: str) -> Exception:
    what = f"`tool_choice` of type allowed_tools {what}."
    return custom_tools.invalid(what, f"tool_choice.allowed_tools.{field}")
