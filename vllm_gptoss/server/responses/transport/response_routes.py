"""/v1/responses: create, retrieve, follow, cancel and delete; compaction, input tokens; the WebSocket."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request, WebSocket
from fastapi.responses import JSONResponse
from starlette.responses import Response

from vllm_gptoss.server.chat.early import is_long
from vllm_gptoss.server.http.bodies import unless_gone
from vllm_gptoss.server.responses.errors import ApiError
from vllm_gptoss.server.responses.request.create import CreateRequest, parse_compact, parse_count
from vllm_gptoss.server.responses.run.background import Background
from vllm_gptoss.server.responses.run.events import last_body
from vllm_gptoss.server.responses.run.service import Service
from vllm_gptoss.server.responses.state.caller import Caller
from vllm_gptoss.server.responses.transport.event_stream import OPEN_RESPONSES, EventStream, names_of
from vllm_gptoss.server.responses.transport.http import body_of, caller_of, errors
from vllm_gptoss.server.responses.transport.openapi import create_body, object_body
from vllm_gptoss.server.responses.transport.paging import asked, listed
from vllm_gptoss.server.responses.transport.websocket import serve_websocket

LAST = 2**31 - 2
"""Sequence numbers are 32-bit integers in the store; no response has as many events."""


def add_routes(router: APIRouter, service: Callable[[], Service], background: Callable[[], Background | None]) -> None:
    """Adds the routes under both prefixes: OpenAI's, and the Open Responses specification's.

    background: runs background responses; None without a store
    """
    routes = _Routes(service, background)
    for prefix in ("/v1", OPEN_RESPONSES):
        path = f"{prefix}/responses"
        one = f"{path}/{{response_id}}"
        table: list[tuple[str, str, Any, dict[str, Any] | None]] = [
            ("POST", path, routes.create, create_body()),
            ("POST", f"{path}/compact", routes.compact, object_body("model", "input", "instructions")),
            ("POST", f"{path}/input_tokens", routes.input_tokens, object_body("model", "input", "tools")),
            ("GET", one, routes.retrieve, None),
            ("DELETE", one, routes.delete, None),
            ("POST", f"{one}/cancel", routes.cancel, None),
            ("GET", f"{one}/input_items", routes.input_items, None),
        ]
        for method, where, handler, body in table:
            router.add_api_route(where, errors(handler), methods=[method], openapi_extra=body)
        router.add_api_websocket_route(path, routes.websocket)


class _Routes:
    def __init__(self, service: Callable[[], Service], background: Callable[[], Background | None]) -> None:
        self._service, self._find_background = service, background

    @property
    def _background(self) -> Background:
        if (background := self._find_background()) is None:
            raise ApiError("This server stores nothing.", param="background", code="store_disabled")
        return background

    async def create(self, raw_request: Request) -> Response:
        caller = caller_of(raw_request)
        body = await body_of(raw_request)
        read = functools.partial(self._service().read, body, caller, is_long=is_long(raw_request))
        if isinstance(body, dict) and body.get("background") is True:
            return await self._create_background(read, caller, names_of(raw_request))
        request = await read()
        hides = bool(request.stream_options and request.stream_options.include_obfuscation)
        loop = await unless_gone(raw_request, self._service().prepare(request, caller))
        if request.stream:
            return EventStream(loop.run(), names_of(raw_request), obfuscate=hides, loop=loop)
        body = await unless_gone(raw_request, last_body(loop.run()))
        if loop.refused:
            raise loop.refused
        if body["status"] == "failed":
            raise ApiError(body["error"]["message"], code="server_error", status=500, kind="server_error")
        return JSONResponse(body)

    async def _create_background(
        self, read: Callable[[], Awaitable[CreateRequest]], caller: Caller, names: Mapping[str, str]
    ) -> Response:
        request, body = await self._background.start(read, caller)
        if not request.stream:
            return JSONResponse(body)
        hides = bool(request.stream_options and request.stream_options.include_obfuscation)
        return EventStream(self._background.follow(body["id"], caller, -1), names, obfuscate=hides)

    async def retrieve(
        self,
        response_id: str,
        raw_request: Request,
        *,
        stream: bool = False,
        starting_after: int = -1,
        include_obfuscation: bool = False,
    ) -> Response:
        caller = caller_of(raw_request)
        starting_after = max(-1, min(starting_after, LAST))
        stored = await self._service().get(response_id, caller)
        if stream:
            if not stored.body["background"]:
                raise ApiError("Only background responses can be streamed again.", param="stream")
            return EventStream(
                self._background.follow(response_id, caller, starting_after),
                names_of(raw_request),
                obfuscate=include_obfuscation,
                after=starting_after,
            )
        return JSONResponse((await self._background.checked(stored)).body)

    async def delete(self, response_id: str, raw_request: Request) -> Response:
        caller = caller_of(raw_request)
        if background := self._find_background():
            await background.stop(response_id, caller)
        await self._service().delete(response_id, caller)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: str, raw_request: Request) -> Response:
        caller = caller_of(raw_request)
        stored = await self._service().get(response_id, caller)
        if not stored.body["background"]:
            raise ApiError("Only background responses can be cancelled.", param="response_id")
        return JSONResponse(await self._background.cancel(stored, caller))

    async def input_items(self, response_id: str, raw_request: Request) -> Response:
        page = asked(raw_request.query_params)
        caller = caller_of(raw_request)
        found = await self._service().input_items(
            response_id, caller, page.limit + 1, page.after, ascending=page.ascending
        )
        return JSONResponse(listed(found, page))

    async def websocket(self, socket: WebSocket) -> None:
        await serve_websocket(self._service(), socket)

    async def compact(self, raw_request: Request) -> Response:
        request = await asyncio.to_thread(parse_compact, await body_of(raw_request))
        caller = caller_of(raw_request)
        return JSONResponse(await unless_gone(raw_request, self._service().compact(request, caller)))

    async def input_tokens(self, raw_request: Request) -> Response:
        caller = caller_of(raw_request)
        request = await self._service().read(await body_of(raw_request), caller, parse_count)
        tokens = await unless_gone(raw_request, self._service().count_input(request, caller))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})
