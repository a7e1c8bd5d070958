"""POST /tokenize with messages as the server renders them, and GET /v1/models/{id}, which vLLM lacks."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from vllm_gptoss import _vllm
from vllm_gptoss.server.chat.chat_request import render_chat_early
from vllm_gptoss.server.chat.chat_route import as_vllm_reads
from vllm_gptoss.server.chat.early import ONLY_COUNTED, settle
from vllm_gptoss.server.http import routes

TOKENIZE, MODEL = "/tokenize", "/v1/models/{model:path}"
_OF_CHAT = (
    *("model", "messages", "tools", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)
"""Fields that /tokenize shares with chat requests."""


def add_routes(app: FastAPI) -> bool:
    """Adds both routes; vLLM then removes its own /tokenize. False if vLLM has no such route."""
    app.add_api_route(MODEL, show_model, methods=["GET"])
    core = routes.posts(app).get(TOKENIZE)
    if core is None:
        return False
    chat_request = routes.body_class(_vllm.chat_requests()[0], as_vllm_reads)

    async def tokenize(request: Any, raw_request: Request) -> Any:
        if not hasattr(request, "messages"):
            return await core.endpoint(request, raw_request)
        body = await raw_request.json()
        chat: Any = chat_request.model_validate({name: body[name] for name in _OF_CHAT if body.get(name) is not None})
        settle(chat.messages)
        ONLY_COUNTED.set(True)  # for this request's task
        await render_chat_early(chat, raw_request)
        handler = raw_request.app.state.openai_serving_chat
        result = await handler.render_chat_request(chat)
        if not isinstance(result, tuple):
            return JSONResponse(result.model_dump(), result.error.code)
        tokens = result[1][0]["prompt_token_ids"]
        tokenizer = handler.renderer.get_tokenizer() if request.return_token_strs else None
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": handler.model_config.max_model_len,
                "tokens": tokens,
                "token_strs": None if tokenizer is None else list(tokenizer.convert_ids_to_tokens(tokens)),
            }
        )

    routes.add_beside(app, core, tokenize)
    return True


async def show_model(model: str, raw_request: Request) -> JSONResponse:
    """The entry of GET /v1/models with this id."""
    listed = await raw_request.app.state.openai_serving_models.show_available_models()
    found = next((entry for entry in listed.data if entry.id == model), None)
    if found is not None:
        return JSONResponse(found.model_dump())
    message = f"The model '{model[:200]}' does not exist."
    error = {"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    return JSONResponse({"error": error}, 404)
