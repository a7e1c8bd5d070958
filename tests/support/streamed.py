"""Served streams without a model: vLLM's handlers and the plugin's subclasses, behind vLLM's web server, with tokens
from a test.

`hand_fed.client` is the engine.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
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
def handlers_of(path: str) -> tuple[Any, Any]:
    """vLLM's handler of `path`, and the plugin's subclass."""
    return (chat_handlers if path == CHAT else completion_handlers)()


class Results:
    """The engine's results of one request, one for each of `parts`: text and tokens; `fails` after the last."""

    def __init__(
        self, parts: Sequence[tuple[str, Sequence[int]]], finish: str | None = "stop", fails: Exception | None = None
    ):
        self._parts, self._finish, self._fails = parts, finish, fails
        self.is_closed = False

    async def __call__(self) -> AsyncIterator[Any]:
        from vllm.outputs import CompletionOutput, RequestOutput

        try:
            for number, (text, ids) in enumerate(self._parts, 1):
                reason = self._finish if number == len(self._parts) and not self._fails else None
                choice = CompletionOutput(0, text, list(ids), None, None, finish_reason=reason)
                yield RequestOutput("r", "hi", [1, 2, 3], None, [choice], reason is not None, num_cached_tokens=1)
                await asyncio.sleep(0)
            if self._fails:
                raise self._fails
        finally:
            self.is_closed = True


def stream_of(path: str, handler: Any, request: Any, results: Any, identifier: str, metadata: Any) -> Any:
    """The stream of `handler` for the engine's results of the request's one prompt."""
    from vllm.utils.async_utils import merge_async_iterators

    if path == CHAT:
        return handler.chat_completion_stream_generator(
            request, results, identifier, 'm "x"', [], object(), metadata, chat_template_kwargs={}
        )
    return handler.completion_stream_generator(
        request, [{}], merge_async_iterators(results), identifier, 7, 'm "x"', 1, None, request_metadata=metadata
    )


def frames_of(path: str, handler: Any, results: Results, request: Any) -> tuple[list[str], Any]:
    """All frames of a stream, without random ids and times, and the usage that was counted."""
    metadata = SimpleNamespace(final_usage_info=None)

    async def read() -> list[str]:
        stream = stream_of(path, handler, request, results(), "c", metadata)
        return [frame.decode() if isinstance(frame, bytes) else frame async for frame in stream]

    found = [re.sub("chatcmpl-tool-[0-9a-f]+", "ID", re.sub('"created":[0-9]+', "", f)) for f in asyncio.run(read())]
    return found, metadata.final_usage_info


def both_frames(path: str, results: Callable[[], Results], request: Callable[[], Any]) -> tuple[Any, Any]:
    """The same of vLLM's handler and of the plugin's."""
    theirs, ours = (frames_of(path, handler, results(), request()) for handler in handlers_of(path))
    return theirs, ours


def handler_app(path: str, engine: Any, *, is_direct: bool = True, **fields: Any) -> FastAPI:
    """vLLM's handler of `path` and the plugin's subclass, behind vLLM's middlewares."""
    app, handler = FastAPI(), handlers_of(path)[1]
    vars(handler)["engine_client"] = engine

    @app.post(path)
    async def create(raw_request: Request) -> StreamingResponse:
        make = request_of if path == CHAT else completion_request
        request = make(**{**await raw_request.json(), "stream": True, **fields})
        params = request.to_sampling_params(10**6, {})
        kind, number = ("chatcmpl", "") if path == CHAT else ("cmpl", "-0")
        identifier = f"{kind}-{request.request_id}"
        if path == CHAT:
            params.detokenize = False
        results = engine.generate({}, params, identifier + number)
        frames = stream_of(path, handler, request, results, identifier, SimpleNamespace())
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
