"""Around creating a response: counting its input, compacting a conversation, warming up, and files that tools left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from vllm_gptoss.responses import ids, resource
from vllm_gptoss.responses.compaction import summarise
from vllm_gptoss.responses.errors import ApiError, not_found
from vllm_gptoss.responses.events import Event, Output
from vllm_gptoss.responses.http import caller_of, errors
from vllm_gptoss.responses.paging import page_of
from vllm_gptoss.responses.past import Caller
from vllm_gptoss.responses.request import CreateRequest, parse_create
from vllm_gptoss.responses.service import Service
from vllm_gptoss.responses.store import Stored
from vllm_gptoss.responses.toolset import Toolset
from vllm_gptoss.tools.base import ToolKind

_COMPACTED = frozenset(
    {
        "model",
        "input",
        "instructions",
        "previous_response_id",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
    }
)


def add_routes(router: APIRouter, service: Callable[[], Service]) -> None:
    async def content(container_id: str, file_id: str, request: Request) -> Response:
        return await _file(service(), container_id, file_id, request)

    async def listed(container_id: str, request: Request) -> Response:
        return JSONResponse(page_of(_files(service(), container_id, request), request.query_params))

    async def described(container_id: str, file_id: str, request: Request) -> Response:
        found = [file for file in _files(service(), container_id, request) if file["id"] == file_id]
        if not found:
            raise not_found("File", file_id)
        return JSONResponse(found[0])

    files = "/v1/containers/{container_id}/files"
    for path, handler in (("", listed), ("/{file_id}", described), ("/{file_id}/content", content)):
        router.add_api_route(files + path, errors(handler), methods=["GET"])


def _files(service: Service, container_id: str, request: Request) -> list[dict[str, Any]]:
    """What can be downloaded of a container, oldest first, for the API key whose response used it."""
    provider: Any = service.providers.of_kind(ToolKind.PYTHON)
    kept = getattr(getattr(provider, "inner", provider), "list_files", None)
    if kept is None or not service.owns(container_id, caller_of(request)):
        raise not_found("Container", container_id)
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
        for file in kept(container_id)
    ]


async def _file(service: Service, container_id: str, file_id: str, request: Request) -> Response:
    """A file that the python tool left, for the API key whose response made it."""
    provider: Any = service.providers.of_kind(ToolKind.PYTHON)
    read = getattr(getattr(provider, "inner", provider), "read_file", None)
    mine = read is not None and service.owns(container_id, caller_of(request))
    found = await read(container_id, file_id) if read and mine else None
    if found is None:
        raise not_found("File", file_id)
    disposition = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(found.filename, safe='')}"}
    return Response(found.data, media_type=found.media_type, headers=disposition)


async def count_input(service: Service, body: Any, caller: Caller) -> dict[str, Any]:
    """POST /v1/responses/input_tokens: how long the prompt of such a request would be."""
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name != "personality"}
    request = parse_create(body)
    loop = await service.prepare(request, caller, holds=False)
    await loop.close()
    return {"object": "response.input_tokens", "input_tokens": loop.prompt_tokens}


async def compact(service: Service, body: Any, caller: Caller) -> dict[str, Any]:
    """POST /v1/responses/compact: the user's messages as they were, and all else as one sealed summary."""
    if not isinstance(body, dict):
        raise ApiError("The request body must be a JSON object.")
    for name in body:
        if name not in _COMPACTED:
            raise ApiError(f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")
    if not body.get("model"):
        raise ApiError("Missing required parameter: 'model'.", param="model", code="missing_required_parameter")
    request = parse_create({**body, "store": False})
    past = await service.past(request, caller)
    history = service.read(request, past, caller, Toolset())
    item, usage = await summarise(service, request, caller, history)
    items = [*past.items, *request.items]
    users = [entry for entry in items if entry["type"] == "message" and entry["role"] == "user"]
    return {
        "id": ids.new("resp"),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*users, item],
        "usage": usage.fields(),
    }


async def warm(service: Service, request: CreateRequest, caller: Caller) -> list[Event]:
    """`generate: false`: checks and keeps a request without generating; its id can be gone on from."""
    loop = await service.prepare(request, caller, holds=False)
    await loop.close()
    out = Output()
    body = loop.body
    events = [out.event("response.created", response=dict(body))]
    usage = resource.Usage(input=loop.prompt_tokens).fields()
    body |= {"status": "completed", "completed_at": int(time.time()), "usage": usage}
    stored = Stored(body["id"], caller.tenant, body, request.items, {}, request.previous_response_id)
    if request.stores and service.store:
        await service.store.save(stored)
    else:
        caller.memory[stored.id] = stored
    return [*events, out.event("response.completed", response=dict(body))]
