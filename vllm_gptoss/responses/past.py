"""What came before a request: the items of the response or conversation that it goes on from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_gptoss.responses.errors import ApiError, not_found
from vllm_gptoss.responses.history import item_ids
from vllm_gptoss.responses.input import Item
from vllm_gptoss.responses.request import CreateRequest
from vllm_gptoss.responses.store import Store, Stored, StoreError

logger = logging.getLogger(__name__)

HOLD = 30.0
"""Seconds that a conversation stays with a response whose server died."""

_ECHOED = frozenset({"item_reference", "web_search_call", "code_interpreter_call", "mcp_call"})


@dataclass(slots=True)
class Caller:
    """Who asks. `tenant` owns what is stored; `memory` holds unstored responses of one WebSocket.

    `adds_search`: an agent that offers `web_search` with every request, whether anybody wants it or not.
    """

    tenant: str
    adds_search: bool = False
    trace_headers: Mapping[str, str] | None = None
    memory: dict[str, Stored] = field(default_factory=dict)


@dataclass(slots=True)
class Past:
    """What came before a request: items, what is hidden behind them, and the first response of the chain."""

    items: list[Item] = field(default_factory=list)
    hidden: dict[str, Any] = field(default_factory=dict)
    root: str = ""


async def past_of(request: CreateRequest, caller: Caller, store: Store | None) -> Past:
    """The items before the request's own; its `item_reference`s become items. Raises `ApiError`."""
    past = Past()
    if request.previous_response_id:
        for stored in await _chain(request.previous_response_id, caller, store):
            past.items += [*stored.input, *stored.body["output"]]
            past.hidden |= stored.hidden
            past.root = past.root or stored.root or stored.id
    elif request.conversation_id and store:
        if await store.conversations.get(caller.tenant, request.conversation_id) is None:
            raise not_found("Conversation", request.conversation_id, "conversation")
        for item, hidden in await store.conversations.items(request.conversation_id):
            past.items.append(item)
            if hidden:
                past.hidden[item["id"]] = hidden
    await _resolve(request, past, caller, store)
    return past


async def _chain(identifier: str, caller: Caller, store: Store | None) -> Sequence[Stored]:
    if identifier in caller.memory:
        chain = [caller.memory[identifier]]
        while (before := chain[0].previous) and before in caller.memory:
            chain.insert(0, caller.memory[before])
        return [*(await _chain(before, caller, store) if before else []), *chain]
    found = await store.chain(caller.tenant, identifier) if store else None
    if found is None:
        message = f"Previous response with id '{identifier}' not found."
        raise ApiError(message, param="previous_response_id", code="previous_response_not_found", status=400)
    if found[-1].status in ("queued", "in_progress"):
        message = f"Response '{identifier}' is not finished yet."
        raise ApiError(message, param="previous_response_id", code="response_not_finished")
    return found


async def _resolve(request: CreateRequest, past: Past, caller: Caller, store: Store | None) -> None:
    """Replaces `item_reference`s, and finds what the model saw behind items that the client echoes."""
    items = request.items
    known = {item["id"]: (item, past.hidden.get(item["id"])) for item in past.items if "id" in item}
    if store and any(item["type"] in _ECHOED for item in items):
        known |= await store.find_items(caller.tenant, item_ids(items))
    for index, item in enumerate(items):
        found, hidden = known.get(item["id"], (None, None))
        if item["type"] == "item_reference":
            if found is None:
                raise not_found("Item", item["id"], f"input[{index}].id")
            items[index] = dict(found)
        if hidden:
            past.hidden[item["id"]] = hidden


class ConversationHold:
    """Keeps a conversation to one response, on whatever server, as OpenAI does: two would not know of each other.

    `take()`, `renew()` while the response runs, `release()`. What is never released ends by itself after `HOLD`.
    """

    def __init__(self, store: Store, tenant: str, conversation: str, response: str) -> None:
        self._rows = store.conversations
        self._tenant = tenant
        self._conversation = conversation
        self._response = response
        self._renewing: asyncio.Task[None] | None = None

    async def take(self) -> None:
        """Raises `ApiError` when the conversation does not exist, or another response works on it."""
        if await self._rows.hold(self._tenant, self._conversation, self._response, HOLD):
            return
        if await self._rows.get(self._tenant, self._conversation) is None:
            raise not_found("Conversation", self._conversation, "conversation")
        message = "Another process is currently operating on this conversation. Please retry in a few seconds."
        raise ApiError(message, param="conversation", code="conversation_locked")

    def renew(self) -> None:
        self._renewing = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(HOLD / 3)
            try:
                await self._rows.hold(self._tenant, self._conversation, self._response, HOLD)
            except StoreError as error:
                logger.warning("Conversation %s could not be kept: %s", self._conversation, error)

    async def release(self) -> None:
        if self._renewing:
            self._renewing.cancel()
        try:
            await self._rows.release(self._conversation, self._response)
        except StoreError as error:
            logger.warning("Conversation %s is locked for %g s more: %s", self._conversation, HOLD, error)
