"""/v1/conversations: a list of items with a name, that responses read from and append to."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from vllm_gptoss.server.responses import ids
from vllm_gptoss.server.responses.errors import ApiError, checked_object, not_found
from vllm_gptoss.server.responses.metrics import CONVERSATIONS
from vllm_gptoss.server.responses.request.create import check_metadata
from vllm_gptoss.server.responses.request.items import Item, parse_input
from vllm_gptoss.server.responses.run.service import Service
from vllm_gptoss.server.responses.state.conversation_store import ConversationStore
from vllm_gptoss.server.responses.transport.http import body_of, caller_of, errors
from vllm_gptoss.server.responses.transport.openapi import object_body
from vllm_gptoss.server.responses.transport.paging import asked, listed, page_of

MAX_ITEMS = 20
"""Items that one call may add (OpenAI's limit)."""


def add_routes(router: APIRouter, service: Callable[[], Service]) -> None:
    """Adds the routes of conversations and their items."""
    routes = _Routes(service)
    one, items = "/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items"
    table: list[tuple[str, str, Any, dict[str, Any] | None]] = [
        ("POST", "/v1/conversations", routes.create, object_body("items", "metadata")),
        ("GET", "/v1/conversations", routes.list_own, None),
        ("GET", one, routes.retrieve, None),
        ("POST", one, routes.update, object_body("metadata")),
        ("DELETE", one, routes.delete, None),
        ("POST", items, routes.add_items, object_body("items")),
        ("GET", items, routes.list_items, None),
        ("GET", items + "/{item_id}", routes.get_item, None),
        ("DELETE", items + "/{item_id}", routes.delete_item, None),
    ]
    for method, path, handler, body in table:
        router.add_api_route(path, errors(handler), methods=[method], openapi_extra=body)


def _resource(identifier: str, created: float, labels: Mapping[str, str]) -> dict[str, Any]:
    return {"id": identifier, "object": "conversation", "created_at": int(created), "metadata": dict(labels)}


class _Routes:
    def __init__(self, service: Callable[[], Service]) -> None:
        self._service = service

    def _store(self) -> ConversationStore:
        return self._service().context.need_store("conversation").conversations

    async def _find(self, identifier: str, request: Request) -> tuple[float, dict[str, str]]:
        found = await self._store().get(caller_of(request).tenant, identifier)
        if found is None:
            raise not_found("Conversation", identifier)
        return found

    async def create(self, request: Request) -> Response:
        body = checked_object(await body_of(request), ("items", "metadata"))
        labels, items = _labels(body), await asyncio.to_thread(_items, body.get("items"))
        identifier, now = ids.new("conv"), time.time()
        await self._store().put(caller_of(request).tenant, identifier, labels, now, [(item, None) for item in items])
        CONVERSATIONS.inc()
        return JSONResponse(_resource(identifier, now, labels))

    async def list_own(self, request: Request) -> Response:
        """The caller's own conversations, which OpenAI's API does not list."""
        page, store, tenant = asked(request.query_params), self._store(), caller_of(request).tenant
        if page.after is not None and not (ids.is_one(page.after) and await store.get(tenant, page.after)):
            raise not_found("Conversation", page.after[:128], "after")
        found = await store.of_tenant(tenant, page.limit + 1, page.after, ascending=page.ascending)
        return JSONResponse(listed([_resource(row.id, row.created, json.loads(row.metadata)) for row in found], page))

    async def retrieve(self, conversation_id: str, request: Request) -> Response:
        return JSONResponse(_resource(conversation_id, *await self._find(conversation_id, request)))

    async def update(self, conversation_id: str, request: Request) -> Response:
        body = checked_object(await body_of(request), ("metadata",))
        created, _ = await self._find(conversation_id, request)
        labels = _labels(body)
        await self._store().put(caller_of(request).tenant, conversation_id, labels, created)
        return JSONResponse(_resource(conversation_id, created, labels))

    async def delete(self, conversation_id: str, request: Request) -> Response:
        if not await self._store().delete(caller_of(request).tenant, conversation_id):
            raise not_found("Conversation", conversation_id)
        return JSONResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def add_items(self, conversation_id: str, request: Request) -> Response:
        await self._find(conversation_id, request)
        body = checked_object(await body_of(request), ("items", "include"))
        items = await asyncio.to_thread(_items, body.get("items"))
        if not items:
            raise ApiError("'items' must not be empty.", param="items", code="missing_required_parameter")
        for twice in await self._store().positions(conversation_id, *(item["id"] for item in items)):
            raise _duplicate(twice)
        await self._store().append(conversation_id, [(item, None) for item in items], caller_of(request).tenant)
        return JSONResponse(page_of(items, {"order": "asc", "limit": "100"}))

    async def list_items(self, conversation_id: str, request: Request) -> Response:
        await self._find(conversation_id, request)
        page = asked(request.query_params)
        store, after = self._store(), page.after
        position = (await store.positions(conversation_id, after)).get(after) if after is not None else None
        if after is not None and position is None:
            raise not_found("Item", after, "after")
        found = await store.page(conversation_id, page.limit + 1, position, ascending=page.ascending)
        return JSONResponse(listed([json.loads(row.item) for row in found], page))

    async def get_item(self, conversation_id: str, item_id: str, request: Request) -> Response:
        await self._find(conversation_id, request)
        known = await self._store().positions(conversation_id, item_id)
        if item_id not in known:
            raise not_found("Item", item_id)
        (row,) = await self._store().page(conversation_id, 1, known[item_id] - 1)
        return JSONResponse(json.loads(row.item))

    async def delete_item(self, conversation_id: str, item_id: str, request: Request) -> Response:
        created, labels = await self._find(conversation_id, request)
        if not await self._store().delete_item(conversation_id, item_id):
            raise not_found("Item", item_id)
        return JSONResponse(_resource(conversation_id, created, labels))


def _labels(body: Mapping[str, Any]) -> dict[str, str]:
    labels = body.get("metadata") or {}
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        raise ApiError("'metadata' maps strings to strings.", param="metadata", code="invalid_type")
    check_metadata(labels)
    return labels


def _items(raw: Any) -> list[Item]:
    items = parse_input(raw if raw is not None else [])
    if len(items) > MAX_ITEMS:
        raise ApiError(f"At most {MAX_ITEMS} items at a time.", param="items")
    if any(item["type"] in ("item_reference", "compaction_trigger") for item in items):
        raise ApiError("A conversation holds whole items only.", param="items", code="unsupported_value")
    seen: set[str] = set()
    for item in items:
        if item["id"] in seen:
            raise _duplicate(item["id"])
        seen.add(item["id"])
    return items


def _duplicate(identifier: str) -> ApiError:
    message = f"Duplicate item found with id {identifier}. Remove duplicate items from your input and try again."
    return ApiError(message, param="items", code="invalid_value")
