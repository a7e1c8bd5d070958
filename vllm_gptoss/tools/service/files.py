"""The files of a tools service's containers, for the caller that made them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from vllm_gptoss.tools.protocol import StoredFile, ToolProvider
from vllm_gptoss.tools.service.access import caller_of
from vllm_gptoss.tools.service.wire import Listed


def file_routes(provider: ToolProvider) -> list[BaseRoute]:
    """`/containers/{id}/files`, and a file's bytes at `…/{file_id}/content`."""

    async def listed(request: Request) -> Response:
        files = _mine(request, await provider.list_files(request.path_params["container_id"]))
        same = ("file_id", "filename", "media_type", "created_at")
        rows = [Listed(bytes=file.size, **{name: getattr(file, name) for name in same}) for file in files]
        return JSONResponse({"files": [row.model_dump() for row in rows]})

    async def content(request: Request) -> Response:
        names = request.path_params
        found = await provider.read_file(names["container_id"], names["file_id"])
        if found is None or not _mine(request, [found]):
            return JSONResponse({"error": "there is no such file"}, 404)
        return Response(found.data, media_type="application/octet-stream")

    where = "/containers/{container_id}/files"
    return [Route(where, listed), Route(f"{where}/{{file_id}}/content", content)]


def _mine(request: Request, files: Sequence[StoredFile]) -> list[StoredFile]:
    caller = caller_of(request)
    return [file for file in files if not caller or file.owner.partition("/")[0] == caller]
