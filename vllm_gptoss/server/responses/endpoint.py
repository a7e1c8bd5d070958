"""The Responses API of one vLLM server: what the plugin attaches, starts and closes."""

from __future__ import annotations

import base64
import logging
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI

from vllm_gptoss._vllm import replaced
from vllm_gptoss.server.harmony.tokens import encode
from vllm_gptoss.server.responses.errors import ApiError
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.prompt.toolset import Providers
from vllm_gptoss.server.responses.request.templates import Templates
from vllm_gptoss.server.responses.run.background import Background
from vllm_gptoss.server.responses.run.context import ContainerOwners, Models, ServerContext
from vllm_gptoss.server.responses.run.engine import Engine, VllmEngine
from vllm_gptoss.server.responses.run.service import Service
from vllm_gptoss.server.responses.state.database import check_driver
from vllm_gptoss.server.responses.state.sealing import KeyRing, new_key, parse_keys
from vllm_gptoss.server.responses.state.store import Store
from vllm_gptoss.server.responses.transport import container_routes, conversation_routes, response_routes
from vllm_gptoss.settings import SettingsError
from vllm_gptoss.tools.config import ToolConfigError
from vllm_gptoss.tools.missing import reason
from vllm_gptoss.tools.server import ToolServer, ToolServerOptions

logger = logging.getLogger(__name__)


class ResponsesEndpoint:
    """The Responses API of one server: `attach` and `start`, or `attach_router` and `open` with another engine.

    `patience`: how long it waits for background responses when it is closed, in seconds; vLLM's `--shutdown-timeout`.
    """

    def __init__(self, options: ResponsesOptions | None = None) -> None:
        self.options = options or ResponsesOptions()
        self._service: Service | None = None
        self._background: Background | None = None
        self._tools: ToolServer | None = None
        self._taken = ""
        self._templates = Templates.load(self.options.prompts)
        self.patience = 0.0
        self._is_direct = True

    def attach(self, app: FastAPI, args: Namespace, settings: Any) -> None:
        """The plugin's first hook. Clears vLLM's `--tool-server`: vLLM would connect to it as an MCP server.

        Raises:
            SettingsError: tool servers, a `GPTOSS_RESPONSES_*` variable or a file of prompt templates cannot be used.
        """
        self.options = ResponsesOptions.load(settings.store, settings.strict_tools, settings.prompts, settings.ui)
        self._templates = Templates.load(self.options.prompts)
        self.patience = float(getattr(args, "shutdown_timeout", None) or 0)
        self._is_direct = settings.host != "stock"
        spec = settings.tools or getattr(args, "tool_server", None)
        if spec:
            try:
                self._tools = ToolServer.from_spec(spec, ToolServerOptions(count_tokens=lambda text: len(encode(text))))
            except ToolConfigError as error:
                raise SettingsError(str(error)) from None
            self._taken, args.tool_server = getattr(args, "tool_server", None) or "", None
            self._tools.shared_by(getattr(args, "api_server_count", None) or 1)
        if self.options.url:
            check_driver(self.options.url)
        self.attach_router(app)

    async def start(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """The plugin's second hook. After an exception, vLLM gets its `--tool-server` back.

        Raises:
            SettingsError: the exception, if vLLM's own tool server does not accept the `--tool-server`.
        """
        providers = Providers()
        try:
            if self._tools:
                await self._tools.start()
                providers = Providers(self._tools.providers, self._tools.remote)
            engine = VllmEngine(engine_client, is_direct=self._is_direct)
            await self.open(engine, served_models(state.openai_serving_models), providers)
        except Exception as error:
            await self.aclose()
            if self._taken:
                await self._give_back(state, args, error)
            raise

    async def _give_back(self, state: Any, args: Namespace, why: Exception) -> None:
        try:
            await replaced.use_tool_server(state, args, self._taken)
        except Exception:
            what = f"--tool-server {self._taken} needs the plugin's Responses API, which failed: {reason(why)}"
            raise SettingsError(what) from why

    @property
    def service(self) -> Service:
        """Answers requests. Raises `ApiError` (503) before `open`."""
        if self._service is None:
            raise ApiError("The server is starting.", status=503, kind="server_error")
        return self._service

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes; they replace vLLM's of the same path and method. The app's shutdown closes the endpoint."""
        router = APIRouter(lifespan=self._lifespan)
        response_routes.add_routes(router, lambda: self.service, lambda: self._background)
        conversation_routes.add_routes(router, lambda: self.service)
        container_routes.add_routes(router, lambda: self.service)
        if self.options.ui:
            from vllm_gptoss.server.responses.transport import server_route
            from vllm_gptoss.server.ui import pages

            pages.add_routes(router)
            server_route.add_routes(router, lambda: self.service)
        app.include_router(router)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Closes the endpoint: under vLLM after the engine has ended, under Ray Serve before that."""
        try:
            yield
        finally:
            await self.aclose()

    async def open(self, engine: Engine, models: Models, providers: Providers) -> None:
        """Opens the store; requests are answered from then on. Raises `StoreError`."""
        store = Store(self.options) if self.options.url else None
        try:
            if store:
                await store.open()
            keys = KeyRing(await self._keys(store))
        except Exception:
            if store:
                await store.aclose()
            raise
        owners = ContainerOwners(store)
        context = ServerContext(engine, models, self.options, providers, store, keys, self._templates, owners)
        self._service = Service(context)
        self._background = Background(self._service, store) if store else None
        logger.info("Responses API of vllm-gptoss: store %s", store.address if store else "off")
        if self._templates:
            logger.info("%d prompt templates of %s", len(self._templates), self.options.prompts)

    async def _keys(self, store: Store | None) -> list[bytes]:
        """The operator's keys, then the store's, which opens data that was encrypted before the operator set keys."""
        keys = parse_keys(self.options.secret)
        if store is None and not keys:
            logger.warning("No store and no GPTOSS_RESPONSES_SECRET: encrypted reasoning is lost when the server ends")
            return [new_key()]
        if store is None:
            return keys
        fresh = None if keys else base64.b64encode(new_key()).decode()
        kept = await store.setting("secret", fresh)
        return [*keys, *([base64.b64decode(kept)] if kept else [])]

    async def aclose(self) -> None:
        """Waits `patience` seconds for background responses, stops them, then closes the store and the tools."""
        if self._background:
            await self._background.aclose(self.patience)
        if self._service and (store := self._service.context.store):
            await store.aclose()
        if self._tools:
            await self._tools.aclose()


def served_models(serving: Any) -> Models:
    """Looks a model up among those vLLM serves: the base model by any of its names, of which the first is the answer's,
    and LoRA adapters."""

    def find(name: str | None) -> tuple[str, Any]:
        if not name or any(name == path.name for path in serving.base_model_paths):
            return serving.base_model_paths[0].name, None
        if name in serving.lora_requests:
            return name, serving.lora_requests[name]
        message = f"The model '{name}' does not exist."
        raise ApiError(message, param="model", code="model_not_found", status=404)

    return find
