"""POST /v1/chat/completions with `tool_choice` of type `allowed_tools`, which vLLM's request model does not know.

vLLM lets an endpoint plugin replace a route of the same path. Ours is vLLM's own handler with a body that subclasses
vLLM's: `allowed_tools` becomes the tools it leaves, and its mode as the choice.
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
from vllm_gptoss.server.chat.early import settle
from vllm_gptoss.server.chat.vllm_constraint import schemas
from vllm_gptoss.server.harmony.enforce import compiling
from vllm_gptoss.server.harmony.enforce.errors import NotNowError
from vllm_gptoss.server.http import routes
from vllm_gptoss.server.streaming.fast_frames import go_straight

PATH, BATCH = "/v1/chat/completions", "/v1/chat/completions/batch"


def replace_route(app: FastAPI) -> bool:
    """Adds our routes beside vLLM's, which vLLM then takes out. False if there is none to replace."""
    found = routes.posts(app)
    if PATH not in found:
        return False

    async def create_chat_completion(request: Any, raw_request: Request) -> Any:
        try:
            await compiling.prepare_all(schemas(request))
            customs = await custom_tools.prepare(request)
        except NotNowError as error:
            body = {"message": str(error), "type": "server_error", "param": None, "code": 503}
            return JSONResponse({"error": body}, 503, error.headers)
        settle(request.messages)
        await render_chat_early(request, raw_request)
        response = await found[PATH].endpoint(request, raw_request)
        return custom_tools.with_custom_calls(response, customs) if customs else go_straight(response)

    async def create_batch(request: Any, raw_request: Request) -> Any:
        return await found[BATCH].endpoint(request, raw_request)

    chat, batch = _vllm.chat_requests()
    for path, ours, base, change in (
        (PATH, create_chat_completion, chat, as_vllm_reads),
        (BATCH, create_batch, batch, checked),
    ):
        # FastAPI reads the body's type from here; it is made at run time, because its base is vLLM's.
        ours.__annotations__ |= {"request": routes.body_class(base, change), "raw_request": Request}
        if core := found.get(path):
            routes.add_beside(app, core, ours)
    return True


def as_vllm_reads(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body of a chat request without what vLLM's request model does not know."""
    return custom_tools.as_functions(without_allowed_tools(checked(data)))


def without_allowed_tools(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body of a request whose `tool_choice` of type `allowed_tools` is carried out.

    Raises:
        vLLM's validation error (400): a mode or tool that is none, or a tool that the request does not have.
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
    function = tool.get(kind) if kind in ("function", "custom") else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _invalid(what: str, field: str) -> Exception:
    error: Exception = _vllm.harmony().ValidationError(
        f"`tool_choice` of type allowed_tools {what}.", parameter=f"tool_choice.allowed_tools.{field}"
    )
    return error
