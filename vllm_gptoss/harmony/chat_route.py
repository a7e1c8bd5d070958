"""POST /v1/chat/completions with `tool_choice` of type `allowed_tools`, which vLLM's request model does not know.

vLLM lets an endpoint plugin replace a route of the same path. Ours is vLLM's own handler with a body that subclasses
vLLM's: `allowed_tools` becomes the tools it leaves, and its mode as the choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, create_model, model_validator

from vllm_gptoss import _vllm, routes
from vllm_gptoss.ahead import go_straight
from vllm_gptoss.harmony.chat_request import render_chat_early
from vllm_gptoss.harmony.early import settle
from vllm_gptoss.harmony.enforce import compiling
from vllm_gptoss.harmony.enforce.errors import NotNowError
from vllm_gptoss.harmony.vllm_constraint import schemas

PATH = "/v1/chat/completions"


def replace_route(app: FastAPI) -> bool:
    """Adds our route beside vLLM's, which vLLM then takes out. False if there is none to replace."""
    core = routes.posts(app).get(PATH)
    if core is None:
        return False
    body = body_class()

    async def create_chat_completion(request: Any, raw_request: Request) -> Any:
        try:
            await compiling.prepare_all(schemas(request))
        except NotNowError as error:
            body = {"message": str(error), "type": "server_error", "param": None, "code": 503}
            return JSONResponse({"error": body}, 503, error.headers)
        settle(request.messages)
        await render_chat_early(request, raw_request)
        return go_straight(await core.endpoint(request, raw_request))

    # FastAPI reads the body's type from here; it is made at run time, because its base is vLLM's.
    create_chat_completion.__annotations__ |= {"request": body, "raw_request": Request}
    routes.add_beside(app, core, create_chat_completion)
    return True


def body_class() -> type[BaseModel]:
    """vLLM's `ChatCompletionRequest` that also takes `allowed_tools`."""

    def narrow(cls: type[BaseModel], data: Any) -> Any:
        del cls
        return without_allowed_tools(data) if isinstance(data, Mapping) else data

    base: type[BaseModel] = _vllm.chat_request()
    validators: Any = {"narrow": model_validator(mode="before")(classmethod(narrow))}  # type: ignore[arg-type]
    return create_model(base.__name__, __base__=base, __module__=__name__, __validators__=validators)


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
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _invalid(what: str, field: str) -> Exception:
    error: Exception = _vllm.harmony().ValidationError(
        f"`tool_choice` of type allowed_tools {what}.", parameter=f"tool_choice.allowed_tools.{field}"
    )
    return error
