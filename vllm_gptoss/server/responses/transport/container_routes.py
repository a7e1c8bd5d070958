"""/v1/containers: files of the python tool, for the API key that owns the response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from vllm_gptoss.server.responses.errors import not_found
from vllm_gptoss.server.responses.run.service import Service
from vllm_gptoss.server.responses.transport.http import caller_of, errors
from vllm_gptoss.server.responses.transport.paging import page_of
from vllm_gptoss.tools.protocol import ToolKind, ToolProvider

_INERT = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox; default-src 'none'"}
"""Files of programs are untrusted: a browser must neither guess their type nor run them."""


def add_routes(router: APIRouter, service: Callable[[], Service]) -> None:
    """Adds the routes that list, describe and read files."""

    async def content(container_id: str, file_id: str, request: Request) -> Response:
        found = await (await _python(service(), container_id, request)).read_file(container_id, file_id)
        if found is None:
            raise not_found("File", file_id)
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(found.filename, safe='')}", **_INERT}
        return Response(found.data, media_type=found.media_type, headers=headers)

    async def listed(container_id: str, request: Request) -> Response:
        return JSONResponse(page_of(await _files(service(), container_id, request), request.query_params))

    async def described(container_id: str, file_id: str, request: Request) -> Response:
        found = [file for file in await _files(service(), container_id, request) if file["id"] == file_id]
        if not found:
            raise not_found("File", file_id)
        return JSONResponse(found[0])

    files = "/v1/containers/{container_id}/files"
    for path, handler in (("", listed), ("/{file_id}", described), ("/{file_id}/content", content)):
        router.add_api_route(files + path, errors(handler), methods=["GET"])


async def _python(service: Service, container_id: str, request: Request) -> ToolProvider:
    """The python tool. Raises `ApiError` (404) where another API key owns the container."""
    provider = service.context.providers.of_kind(ToolKind.PYTHON)
    if provider is None or await service.context.containers.used(container_id, caller_of(request)) is None:
        raise not_found("Container", container_id)
    return provider


async def _files(service: Service, container_id: str, request: Request) -> list[dict[str, Any]]:
    """Files of a container, oldest first. Raises as `_python`."""
    return [
        {
            "id": file.file_id,
            "object": "container.file",
            "bytes": file.size,
            "container_id": file.container_id,
            "created_at": file.created_at,
            "path": f"/mnt/data/{file.filename}",
            "source": "assistant",
        }
        for file in await (await _python(service, container_id, request)).list_files(container_id)
    ]
