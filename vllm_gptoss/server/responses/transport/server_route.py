"""/v1/ui/server: the parts of this server, for the web page. Below /v1, where vLLM checks the API key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from vllm_gptoss import _vllm
from vllm_gptoss._vllm import compatibility
from vllm_gptoss.server.responses.run.service import Service
from vllm_gptoss.server.responses.transport.http import errors
from vllm_gptoss.tools.protocol import ToolProvider
from vllm_gptoss.version import __version__


def add_routes(router: APIRouter, service: Callable[[], Service]) -> None:
    """Adds the route. The answer has versions, parts that are off with the reason, tools and the kind of store."""

    async def describe(request: Request) -> Response:
        del request
        context = service().context
        return JSONResponse(
            {
                "object": "gptoss.server",
                "version": __version__,
                "vllm": _vllm.version(),
                "model": context.models(None)[0],
                "off": {part: why for part in compatibility.PARTS if (why := compatibility.why_off(part))},
                "tools": [_tool(provider) for provider in context.providers.configured],
                "store": (context.options.url or "off").partition(":")[0],
            }
        )

    router.add_api_route("/v1/ui/server", errors(describe), methods=["GET"])


def _tool(provider: ToolProvider) -> dict[str, Any]:
    spaces = [{"name": space.name, "kind": space.kind.value} for space in provider.namespaces()]
    return {"name": provider.name, "unavailable": provider.unavailable, "namespaces": spaces}
