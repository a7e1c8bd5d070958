"""Routes of the Responses API on vLLM's FastAPI app, in place of vLLM's own."""

from __future__ import annotations

import base64
import logging
from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse
from starlette.responses import Response

from vllm_gptoss.harmony.tokens import encode
from vllm_gptoss.responses import conversations, extras
from vllm_gptoss.responses.background import Background
from vllm_gptoss.responses.config import ResponsesConfig
from vllm_gptoss.responses.engine import Engine, VllmEngine
from vllm_gptoss.responses.errors import ApiError
from vllm_gptoss.responses.http import (
    OPEN_RESPONSES,
    EventStream,
    body_of,
    caller_of,
    errors,
    names_of,
    unless_gone,
)
from vllm_gptoss.responses.openapi import create_body, object_body
from vllm_gptoss.responses.paging import page_of
from vllm_gptoss.responses.request import parse_create
from vllm_gptoss.responses.sealing import Sealer, new_key
from vllm_gptoss.responses.service import Models, Service, last_body
from vllm_gptoss.responses.store import Store
from vllm_gptoss.responses.toolset import Providers
from vllm_gptoss.responses.websocket import serve_websocket
from vllm_gptoss.tools.server import ToolServer, ToolServerOptions

logger = logging.getLogger(__name__)


class ResponsesEndpoint:
    """The Responses API of one server: `attach_router`, then `init_state` (or `open` with another engine)."""

    def __init__(self, config: ResponsesConfig | None = None) -> None:
        self.config = config or ResponsesConfig.load()
        self._service: Service | None = None
        self._background: Background | None = None
        self._tools: ToolServer | None = None

    def attach(self, app: FastAPI, args: Namespace, settings: Any) -> None:
        """The plugin's first hook. Takes `--tool-server` for itself: vLLM would dial it as an MCP server of its own.

        Raises:
            ToolConfigError: the tool servers are not described rightly.
        """
        self.config = ResponsesConfig.load(store=settings.store, strict_tools=settings.strict_tools)
        spec = settings.tools or getattr(args, "tool_server", None)
        if spec:
            self._tools = ToolServer.from_spec(spec, ToolServerOptions(count_tokens=lambda text: len(encode(text))))
            args.tool_server = None
            self._tools.shared_by(getattr(args, "api_server_count", None) or 1)
        self.attach_router(app)

    async def start(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """The plugin's second hook."""
        providers = Providers()
        if self._tools:
            await self._tools.start()
            providers = Providers(self._tools.providers, self._tools.remote)
        await self.init_state(engine_client, state, args, providers)

    @property
    def service(self) -> Service:
        if self._service is None:
            raise ApiError("The server is starting.", status=503, kind="server_error")
        return self._service

    @property
    def background(self) -> Background:
        if self._background is None:
            raise ApiError("This server stores nothing.", param="background", code="store_disabled")
        return self._background

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes; vLLM lets them replace its own of the same path and method."""
        router = APIRouter()
        for prefix in ("/v1", OPEN_RESPONSES):
            self._add_routes(router, f"{prefix}/responses")
        conversations.add_routes(router, lambda: self.service)
        extras.add_routes(router, lambda: self.service)
        app.include_router(router)

    def _add_routes(self, router: APIRouter, path: str) -> None:
        one = f"{path}/{{response_id}}"
        table: list[tuple[str, str, Any, dict[str, Any] | None]] = [
            ("POST", path, self.create, create_body()),
            ("POST", f"{path}/compact", self.compact, object_body("model", "input", "instructions")),
            ("POST", f"{path}/input_tokens", self.input_tokens, object_body("model", "input", "tools")),
            ("GET", one, self.retrieve, None),
            ("DELETE", one, self.delete, None),
            ("POST", f"{one}/cancel", self.cancel, None),
            ("GET", f"{one}/input_items", self.input_items, None),
        ]
        for method, where, handler, body in table:
            router.add_api_route(where, errors(handler), methods=[method], openapi_extra=body)
        router.add_api_websocket_route(path, self.websocket)

    async def init_state(
        self, engine_client: Any, state: Any, args: Namespace, providers: Providers | None = None
    ) -> None:
        """vLLM's hook: the engine client and the served models are there now."""
        del args
        await self.open(VllmEngine(engine_client), served_models(state.openai_serving_models), providers or Providers())

    async def open(self, engine: Engine, models: Models, providers: Providers) -> None:
        store = Store(self.config) if self.config.url else None
        if store:
            await store.open()
        sealer = Sealer(await self._key(store))
        self._service = Service(engine, models, self.config, providers, store, sealer)
        self._background = Background(self._service, store) if store else None
        logger.info("Responses API of vllm-gptoss: store %s", self.config.url or "off")

    async def _key(self, store: Store | None) -> bytes:
        if self.config.secret:
            return base64.b64decode(self.config.secret)
        if store is None:
            logger.warning("No store and no GPTOSS_RESPONSES_SECRET: encrypted reasoning is lost when the server ends")
            return new_key()
        return base64.b64decode(await store.setting("secret", base64.b64encode(new_key()).decode()))

    async def aclose(self) -> None:
        if self._background:
            await self._background.aclose()
        if self._service and self._service.store:
            await self._service.store.aclose()
        if self._tools:
            await self._tools.aclose()

    # Routes

    async def create(self, raw_request: Request) -> Response:
        request = parse_create(await body_of(raw_request))
        caller = caller_of(raw_request)
        hides = bool(request.stream_options and request.stream_options.include_obfuscation)
        if request.background:
            background = self.background
            identifier, body = await background.start(request, caller)
            if not request.stream:
                return JSONResponse(body)
            return EventStream(background.follow(identifier, caller, -1), names_of(raw_request), obfuscate=hides)
        loop = await self.service.prepare(request, caller)
        if request.stream:
            return EventStream(loop.run(), names_of(raw_request), obfuscate=hides)
        body = await unless_gone(raw_request, last_body(loop.run()))
        if loop.refused:
            raise loop.refused
        if body["status"] == "failed":
            raise ApiError(body["error"]["message"], code="server_error", status=500, kind="server_error")
        return JSONResponse(body)

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
        stored = await self.service.get(response_id, caller)
        if stream:
            if not stored.body["background"]:
                raise ApiError("Only background responses can be streamed again.", param="stream")
            return EventStream(
                self.background.follow(response_id, caller, starting_after),
                names_of(raw_request),
                obfuscate=include_obfuscation,
            )
        return JSONResponse((await self.background.checked(stored)).body)

    async def delete(self, response_id: str, raw_request: Request) -> Response:
        caller = caller_of(raw_request)
        if self._background:
            await self._background.stop(response_id, caller)
        await self.service.delete(response_id, caller)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: str, raw_request: Request) -> Response:
        caller = caller_of(raw_request)
        stored = await self.service.get(response_id, caller)
        if not stored.body["background"]:
            raise ApiError("Only background responses can be cancelled.", param="response_id")
        return JSONResponse(await self.background.cancel(stored, caller))

    async def input_items(self, response_id: str, raw_request: Request) -> Response:
        stored = await self.service.get(response_id, caller_of(raw_request))
        return JSONResponse(page_of(stored.input, raw_request.query_params))

    async def websocket(self, socket: WebSocket) -> None:
        await serve_websocket(self.service, socket)

    async def compact(self, raw_request: Request) -> Response:
        body, caller = await body_of(raw_request), caller_of(raw_request)
        return JSONResponse(await unless_gone(raw_request, extras.compact(self.service, body, caller)))

    async def input_tokens(self, raw_request: Request) -> Response:
        body, caller = await body_of(raw_request), caller_of(raw_request)
        return JSONResponse(await extras.count_input(self.service, body, caller))


def served_models(serving: Any) -> Models:
    """Looks a model up among those vLLM serves: the base model under its names, and LoRA adapters."""

    def find(name: str | None) -> tuple[str, Any]:
        if not name:
            return serving.base_model_paths[0].name, None
        if any(name == path.name for path in serving.base_model_paths):
            return name, None
        if name in serving.lora_requests:
            return name, serving.lora_requests[name]
        message = f"The model '{name}' does not exist."
        raise ApiError(message, param="model", code="model_not_found", status=404)

    return find
