"""A server as the plugin finds it, where it attaches: its arguments and its routes."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from vllm_gptoss.server.chat.endpoint import ChatCompletions
from vllm_gptoss.settings import Settings


def arguments(backend: str = "auto", **given: Any) -> Namespace:
    defaults = {
        "enable_auto_tool_choice": False,
        "tool_call_parser": None,
        "tool_strict_level": "auto",
        "middleware": [],
    }
    structured = SimpleNamespace(reasoning_parser="", backend=backend)
    return Namespace(**{**defaults, **given}, structured_outputs_config=structured)


def attached_around(router: APIRouter) -> FastAPI:
    """vLLM's way to attach a plugin, around routes that stand for its own."""
    from vllm.exceptions import VLLMValidationError

    app = FastAPI()
    app.include_router(router)
    ChatCompletions().attach(app, arguments(), Settings())
    app.router.routes.reverse()  # vLLM removes the replaced route; here the plugin's only has to be first

    @app.exception_handler(VLLMValidationError)
    async def refused(_: Request, error: VLLMValidationError) -> JSONResponse:
        return JSONResponse({"param": error.parameter, "message": str(error)}, 400)

    return app
