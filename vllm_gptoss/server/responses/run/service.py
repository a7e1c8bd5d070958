"""The Responses API without HTTP, for the routes and the WebSocket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from vllm_gptoss.server.http.callers import Places
from vllm_gptoss.server.responses import ids
from vllm_gptoss.server.responses.errors import not_found
from vllm_gptoss.server.responses.prompt.conversation import too_long
from vllm_gptoss.server.responses.request.create import CreateRequest, Filled, parse_create
from vllm_gptoss.server.responses.request.items import Item
from vllm_gptoss.server.responses.run.build_job import build_job, read_history, read_previous
from vllm_gptoss.server.responses.run.compaction import summarise
from vllm_gptoss.server.responses.run.context import ServerContext
from vllm_gptoss.server.responses.run.events import Event, Output
from vllm_gptoss.server.responses.run.loop import Loop
from vllm_gptoss.server.responses.run.response_object import Usage
from vllm_gptoss.server.responses.state.caller import Caller
from vllm_gptoss.server.responses.state.conversation_hold import ConversationHold
from vllm_gptoss.server.responses.state.stored import Stored, stored_request
from vllm_gptoss.tools.protocol import CALLER

Parse = Callable[[Any, Filled | None], CreateRequest]
"""`parse_create`, or the parser of another route's body."""


class Service:
    """Makes responses, and finds those that are stored. Every method raises `ApiError` or `StoreError`."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self.sockets = Places(context.options.max_sockets, context.options.total_sockets)

    async def read(
        self, body: Any, caller: Caller, parse: Parse = parse_create, *, is_long: bool = True
    ) -> CreateRequest:
        """A checked request with its prompt template filled in. One that `is_long` is checked in a thread."""
        filled = self.context.templates.fill(body, caller.tenant)
        return await asyncio.to_thread(parse, *filled) if is_long else parse(*filled)

    async def prepare(
        self, request: CreateRequest, caller: Caller, *, queued: bool = False, holds: bool = True, connects: bool = True
    ) -> Loop:
        """Checks everything that can be checked before the first token, so that errors are HTTP errors.

        `holds`: no other response may use the conversation until the loop has run or is closed. `connects`: the tools
        are opened; else the loop cannot run.
        """
        CALLER.set(caller.owner)
        identifier = request.request_id or ids.new("resp")
        hold = None
        if request.conversation_id and holds:
            store = self.context.need_store("conversation")
            hold = ConversationHold(store, caller.tenant, request.conversation_id, identifier)
            await hold.take()
        try:
            job = await build_job(self.context, request, caller, identifier, queued=queued, connects=connects)
            return Loop(job, hold)
        except BaseException:
            if hold:
                await hold.release()
            raise

    async def count_input(self, request: CreateRequest, caller: Caller) -> int:
        """Number of tokens of this request's prompt. Opens no tool.

        The tools of an MCP server that the request brings along count where the conversation has their list.
        """
        loop = await self.prepare(request, caller, holds=False, connects=False)
        if not loop.prompt_tokens:
            raise too_long(self.context.engine.max_model_len)
        return loop.prompt_tokens

    async def warm(self, request: CreateRequest, caller: Caller) -> list[Event]:
        """`generate: false`: checks and stores a request without generating; a later request can continue it."""
        loop = await self.prepare(request, caller, holds=False)
        await loop.close()
        out = Output()
        body = loop.body
        events = [out.event("response.created", response=dict(body))]
        usage = Usage(input=loop.prompt_tokens).fields()
        body |= {"status": "completed", "completed_at": int(time.time()), "usage": usage}
        stored = stored_request(request, caller.tenant, body)
        if request.stores and self.context.store:
            await self.context.store.save(stored)
        elif caller.memory is not None:
            caller.memory.add(stored)
        return [*events, out.event("response.completed", response=dict(body))]

    async def compact(self, request: CreateRequest, caller: Caller) -> dict[str, Any]:
        """The `response.compaction`: the user's messages unchanged, everything else as one encrypted summary."""
        previous = await read_previous(self.context, request, caller)
        history = await read_history(self.context, request, previous, caller)
        item, usage = await summarise(self.context, request, caller, history)
        items = [*previous.items, *request.items]
        users = [entry for entry in items if entry["type"] == "message" and entry["role"] == "user"]
        return {
            "id": ids.new("resp"),
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*users, item],
            "usage": usage.fields(),
        }

    async def get(self, identifier: str, caller: Caller) -> Stored:
        """A stored response of the caller."""
        store = self.context.store
        stored = await store.get(caller.tenant, identifier) if store else None
        if stored is None:
            raise not_found("Response", identifier)
        return stored

    async def input_items(
        self, identifier: str, caller: Caller, limit: int, after: str | None, *, ascending: bool
    ) -> list[Item]:
        """Up to `limit` of a stored response's input items: `Store.input_page`."""
        store = self.context.store
        keys = await store.chain_keys(caller.tenant, identifier) if store else []
        if store is None or not keys:
            raise not_found("Response", identifier)
        items = await store.input_page(keys, limit, after, ascending=ascending)
        if items is None:
            raise not_found("Item", after or "", "after")
        return items

    async def delete(self, identifier: str, caller: Caller) -> None:
        """Deletes a stored response of the caller."""
        store = self.context.store
        if not (store and await store.delete(caller.tenant, identifier)):
            raise not_found("Response", identifier)
