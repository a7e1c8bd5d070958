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
from vllm_gptoss.server.responses.transport.http import caller_of, errors
from vllm_gptoss.server.ui.doctor import Doctor
from vllm_gptoss.tools.protocol import ToolProvider
from vllm_gptoss.version import __version__


def add_routes(router: APIRouter, service: Callable[[], Service]) -> None:
    """Adds the route. The answer has versions, choices, parts that are off with the reason, tools, the kind of store,
    the last tool errors of the caller's API key, and doctor's findings, for which `?doctor` starts doctor."""
    doctor = Doctor()

    async def describe(request: Request) -> Response:
        context = service().context
        if "doctor" in request.query_params:
            doctor.start()
        return JSONResponse(
            {
                "object": "gptoss.server",
                "version": __version__,
                "vllm": _vllm.version(),
                "model": context.models(None)[0],
                "choices": dict(await context.engine.choices()),
                "off": {part: why for part in compatibility.PARTS if (why := compatibility.why_off(part))},
                "tools": [_tool(provider) for provider in context.providers.configured],
                "store": (context.options.url or "off").partition(":")[0],
                "tool_errors": context.tool_errors.of(caller_of(request).tenant),
                "doctor": doctor.findings,
            }
        )

    router.add_api_route("/v1/ui/server", errors(describe), methods=["GET"])


def _tool(provider: ToolProvider) -> dict[str, Any]:
    spaces = [{"name": space.name, "kind": space.kind.value} for space in provider.namespaces()]
    known = {name: getattr(provider, name) for name in ("name", "unavailable", "note", "isolation", "at_once")}
    return {**known, "namespaces": spaces}
