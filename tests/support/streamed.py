"""Served streams without a model: vLLM's handlers and the plugin's subclasses, behind vLLM's web server, with tokens
from a test.

`hand_fed.client` is the engine.
"""

from __future__ import annotations

import json
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from prometheus_fastapi_instrumentator import Instrumentator
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import StreamingResponse

from tests.support.chat_requests import HANDLER, chat_handlers, request_of
from tests.support.responses.server import models
from vllm_gptoss.server.responses.endpoint import ResponsesEndpoint
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.prompt.toolset import Providers
from vllm_gptoss.server.responses.run.engine import VllmEngine
from vllm_gptoss.server.streaming.fast_frames import go_straight

CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"


def completion_request(**fields: Any) -> Any:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    return CompletionRequest(model="m", prompt=[1, 2, 3], **fields)


def completion_handlers() -> tuple[Any, Any]:
    """vLLM's completions handler, and the plugin's subclass of it, without a server."""
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    from vllm_gptoss._vllm.replaced import use_handler
    from vllm_gptoss.server.chat.completions import CompletionStream

    theirs = object.__new__(OpenAIServingCompletion)
    vars(theirs).update(HANDLER)
    state = SimpleNamespace(openai_serving_completion=theirs)
    use_handler(state, "openai_serving_completion", CompletionStream)
    return theirs, state.openai_serving_completion


@cache
def handler_of(path: str) -> Any:
    return (chat_handlers if path == CHAT else completion_handlers)()[1]


def completion_frames(handler: Any, request: Any, results: Any, identifier: str, metadata: Any) -> Any:
    """The stream of `handler` for the engine's results of the request's one prompt."""
    from vllm.utils.async_utils import merge_async_iterators

    return handler.completion_stream_generator(
        request, [{}], merge_async_iterators(results), identifier, 7, 'm "x"', 1, None, request_metadata=metadata
    )


def handler_app(path: str, engine: Any, *, is_direct: bool = True, **fields: Any) -> FastAPI:
    """vLLM's handler of `path` and the plugin's subclass, behind vLLM's middlewares."""
    app, handler = FastAPI(), handler_of(path)
    vars(handler)["engine_client"] = engine

    @app.post(path)
    async def create(raw_request: Request) -> StreamingResponse:
        make = request_of if path == CHAT else completion_request
        request = make(**{**await raw_request.json(), "stream": True, **fields})
        params = request.to_sampling_params(10**6, {})
        if path == CHAT:
            params.detokenize = False
            identifier = f"chatcmpl-{request.request_id}"
            frames = handler.chat_completion_stream_generator(
                request, engine.generate({}, params, identifier), identifier, "m", [], object(), SimpleNamespace(),
                chat_template_kwargs={},
            )  # fmt: skip
        else:
            identifier = f"cmpl-{request.request_id}"
            results = engine.generate({}, params, f"{identifier}-0")
            frames = completion_frames(handler, request, results, identifier, SimpleNamespace())
        response = StreamingResponse(frames, media_type="text/event-stream")
        return go_straight(response) if is_direct else response

    return with_middlewares(app)


class Wraps(BaseHTTPMiddleware):
    """A middleware as `--middleware` builds it from a function: it passes the body on through a new stream."""

    async def dispatch(self, request: Request, call_next: Any) -> Any:
        return await call_next(request)


async def responses_app(engine: Any, *, is_direct: bool = True) -> FastAPI:
    endpoint = ResponsesEndpoint(ResponsesOptions(store="off"))
    await endpoint.open(VllmEngine(engine, is_direct=is_direct), models, Providers())
    app = FastAPI()
    endpoint.attach_router(app)
    return with_middlewares(app)


def with_middlewares(app: FastAPI) -> FastAPI:
    app.add_middleware(CORSMiddleware, allow_origins=["*"])
    Instrumentator().instrument(app)
    return app


async def app_of(path: str, engine: Any, *, is_direct: bool = True) -> FastAPI:
    if path == RESPONSES:
        return await responses_app(engine, is_direct=is_direct)
    return handler_app(path, engine, is_direct=is_direct)


def body_of(path: str, **fields: Any) -> bytes:
    body = {"input": "hi", "stream": True, "store": False} if path == RESPONSES else {}
    return json.dumps({**body, **fields}).encode()


def text_of(path: str, body: bytes) -> str:
    """The answer's text, event by event; of completions all of it, raw."""
    said = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    if path == CHAT:
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in said if event.get("choices"))
    if path == COMPLETIONS:
        return "".join(event["choices"][0]["text"] for event in said if event.get("choices"))
    numbers = [event["sequence_number"] for event in said]
    assert numbers == list(range(len(said))), "events come in order"
    return "".join(event["delta"] for event in said if event["type"] == "response.output_text.delta")


def without_made_up(body: bytes) -> str:
    """The parts that do not differ between streams."""
    return re.sub(
        r'"(created|created_at|completed_at)":\d+|(chatcmpl|chatcmpl-tool|cmpl|resp|rs|msg|fc|call)_?-?[0-9a-f]{16,}',
        "",
        body.decode(),
    )
