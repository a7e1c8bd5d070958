"""The items before a request: those of the response or conversation that it continues.

In: a checked request and its caller. Out: `Previous`, with the request's own `item_reference`s replaced by items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_gptoss.server.responses.errors import ApiError, not_found
from vllm_gptoss.server.responses.request.create import CreateRequest
from vllm_gptoss.server.responses.request.items import Item
from vllm_gptoss.server.responses.state.caller import Caller
from vllm_gptoss.server.responses.state.store import Store
from vllm_gptoss.server.responses.state.stored import Stored

_ECHOED = frozenset({"item_reference", "web_search_call", "code_interpreter_call", "mcp_call"})


@dataclass(slots=True)
class Previous:
    """Items before a request, hidden data by item id, and the first response of the chain."""

    items: list[Item] = field(default_factory=list)
    hidden: dict[str, Any] = field(default_factory=dict)
    root: str = ""


async def previous_items(request: CreateRequest, caller: Caller, store: Store | None) -> Previous:
    """The items before the request's own; its `item_reference`s become items. Raises `ApiError`."""
    previous = Previous()
    if request.previous_response_id:
        for stored in await _chain(request.previous_response_id, caller, store):
            previous.items += [*stored.input, *stored.body["output"]]
            previous.hidden |= stored.hidden
            previous.root = previous.root or stored.root or stored.id
    elif request.conversation_id and store:
        if await store.conversations.get(caller.tenant, request.conversation_id) is None:
            raise not_found("Conversation", request.conversation_id, "conversation")
        for item, hidden in await store.conversations.items(request.conversation_id):
            previous.items.append(item)
            if hidden:
                previous.hidden[item["id"]] = hidden
    await _resolve(request, previous, caller, store)
    return previous


async def _chain(identifier: str, caller: Caller, store: Store | None) -> Sequence[Stored]:
    if remembered := _remembered(identifier, caller):
        before = remembered[0].previous
        return [*(await _chain(before, caller, store) if before else []), *remembered]
    found = await store.chain(caller.tenant, identifier) if store else None
    if found is None:
        message = f"Previous response with id '{identifier}' not found."
        raise ApiError(message, param="previous_response_id", code="previous_response_not_found", status=400)
    if found[-1].status in ("queued", "in_progress"):
        message = f"Response '{identifier}' is not finished yet."
        raise ApiError(message, param="previous_response_id", code="response_not_finished")
    return found


def _remembered(identifier: str | None, caller: Caller) -> list[Stored]:
    """The end of a chain that the caller's WebSocket holds, oldest first."""
    chain: list[Stored] = []
    while identifier and caller.memory and (stored := caller.memory.get(identifier)):
        chain.insert(0, stored)
        identifier = stored.previous
    return chain


async def _resolve(request: CreateRequest, previous: Previous, caller: Caller, store: Store | None) -> None:
    """Replaces `item_reference`s, and finds the hidden data of items that the client echoes."""
    items = request.items
    known = {item["id"]: (item, previous.hidden.get(item["id"])) for item in previous.items if "id" in item}
    if store and any(item["type"] in _ECHOED for item in items):
        known |= await store.find_items(caller.tenant, [item["id"] for item in items if "id" in item])
    for index, item in enumerate(items):
        found, hidden = known.get(item["id"], (None, None))
        if item["type"] == "item_reference":
            if found is None:
                raise not_found("Item", item["id"], f"input[{index}].id")
            items[index] = dict(found)
        if hidden:
            previous.hidden[item["id"]] = hidden
