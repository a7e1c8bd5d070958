"""Stored conversations: their metadata, their items in order, and the response that holds each."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from vllm_gptoss.server.responses.state.clock import now
from vllm_gptoss.server.responses.state.quotas import Quotas, StorageUsage
from vllm_gptoss.server.responses.state.shielding import shield_methods
from vllm_gptoss.server.responses.state.tables import conversation_items, conversations

logger = logging.getLogger(__name__)

PAGE = 500
"""Items that are read at once: 22,000 together stopped the event loop for a second."""

Items = Sequence[tuple[dict[str, Any], Any]]
"""Items, each with its hidden data."""


@shield_methods
class ConversationStore:
    """Part of `Store`; `begin` opens a transaction, and raises `StoreError` when the database fails."""

    def __init__(self, begin: Callable[[], AbstractAsyncContextManager[AsyncConnection]], quotas: Quotas) -> None:
        self._begin = begin
        self._quotas = quotas

    async def put(
        self, tenant: str, identifier: str, labels: Mapping[str, str], created: float, items: Items = ()
    ) -> None:
        """Writes a conversation, new with its first items, or changed.

        Raises:
            QuotaError: the tenant may store no more.
        """
        row = {"id": identifier, "tenant": tenant, "created": created, "metadata": json.dumps(dict(labels))}
        async with self._begin() as db:
            mine = _mine(tenant, identifier)
            changed = await db.execute(sa.update(conversations).where(mine).values(metadata=row["metadata"]))
        if not changed.rowcount:
            rows = rows_of(identifier, items)
            await self._quotas.make_room(tenant, usage_of(rows) + StorageUsage(conversations=1))
            async with self._begin() as db:
                await db.execute(sa.insert(conversations).values(row))
                await append(db, identifier, rows)

    async def get(self, tenant: str, identifier: str) -> tuple[float, dict[str, str]] | None:
        """When the conversation was made (seconds since 1970) and its metadata; None if it is not the tenant's."""
        async with self._begin() as db:
            row = (await db.execute(sa.select(conversations).where(_mine(tenant, identifier)))).first()
        return (row._mapping["created"], json.loads(row._mapping["metadata"])) if row else None

    async def delete(self, tenant: str, identifier: str) -> bool:
        """Removes a conversation with its items; False if it is not the tenant's."""
        async with self._begin() as db:
            gone = (await db.execute(sa.delete(conversations).where(_mine(tenant, identifier)))).rowcount
            if gone:
                inside = conversation_items.c.conversation == identifier
                await db.execute(sa.delete(conversation_items).where(inside))
        return bool(gone)

    async def append(self, identifier: str, items: Items, tenant: str = "") -> None:
        """Adds items at the end; without effect if the conversation was deleted.

        `tenant`: the owner, for its quota. It is empty for items of a finished response, which are always stored.

        Raises:
            QuotaError: the tenant's quota is used up.
        """
        rows = rows_of(identifier, items)
        if tenant:
            await self._quotas.make_room(tenant, usage_of(rows))
        async with self._begin() as db:
            await append(db, identifier, rows)

    async def items(self, identifier: str) -> list[tuple[dict[str, Any], Any]]:
        """The conversation's items in order, each with its hidden data."""
        items: list[tuple[dict[str, Any], Any]] = []
        after: int | None = None
        while True:
            rows = await self.page(identifier, PAGE, after)
            items += [(json.loads(r.item), json.loads(r.hidden) if r.hidden else None) for r in rows]
            if len(rows) < PAGE:
                return items
            after = rows[-1].position

    async def page(
        self, identifier: str, limit: int, after: int | None = None, *, ascending: bool = True
    ) -> Sequence[sa.Row[Any]]:
        """Up to `limit` rows of the conversation's items after the position `after`, in either direction."""
        c = conversation_items.c
        query = sa.select(conversation_items).where(c.conversation == identifier).limit(limit)
        query = query.order_by(c.position if ascending else c.position.desc())
        if after is not None:
            query = query.where(c.position > after if ascending else c.position < after)
        async with self._begin() as db:
            return (await db.execute(query)).all()

    async def position(self, identifier: str, item: str) -> int | None:
        """The position of an item in the conversation; None if the conversation does not have it."""
        c = conversation_items.c
        query = sa.select(c.position).where(c.conversation == identifier, c.id == item)
        async with self._begin() as db:
            return await db.scalar(query)

    async def has_items(self, identifier: str, items: Sequence[str]) -> set[str]:
        """The ids of `items` that are in the conversation."""
        c = conversation_items.c
        query = sa.select(c.id).where(c.conversation == identifier, c.id.in_(items))
        async with self._begin() as db:
            return set((await db.execute(query)).scalars())

    async def delete_item(self, identifier: str, item: str) -> bool:
        """Removes one item; False if it is not there."""
        where = (conversation_items.c.conversation == identifier) & (conversation_items.c.id == item)
        async with self._begin() as db:
            return bool((await db.execute(sa.delete(conversation_items).where(where))).rowcount)

    async def hold(self, tenant: str, identifier: str, holder: str, seconds: float) -> bool:
        """Locks the conversation for `holder`, or renews that; False if another holder has it, or it does not exist."""
        c = conversations.c
        free = c.held_by.is_(None) | (c.held_by == holder) | (c.held_until < now())
        async with self._begin() as db:
            held = sa.update(conversations).where(_mine(tenant, identifier) & free)
            return bool((await db.execute(held.values(held_by=holder, held_until=now() + seconds))).rowcount)

    async def release(self, identifier: str, holder: str) -> None:
        """Unlocks the conversation, if `holder` has it, and stores the time."""
        mine = (conversations.c.id == identifier) & (conversations.c.held_by == holder)
        async with self._begin() as db:
            await db.execute(sa.update(conversations).where(mine).values(held_by=None, held_until=now()))


def _mine(tenant: str, identifier: str) -> sa.ColumnElement[bool]:
    return (conversations.c.id == identifier) & (conversations.c.tenant == tenant)


def rows_of(conversation: str, items: Items) -> list[dict[str, Any]]:
    """Rows of `gptoss_conversation_items`."""
    rows = []
    for item, hidden in items:
        shown, kept = json.dumps(item), json.dumps(hidden) if hidden is not None else None
        row = {"conversation": conversation, "id": item["id"], "item": shown, "hidden": kept}
        rows.append(row | {"bytes": len(shown) + len(kept or "")})
    return rows


def usage_of(rows: Sequence[Mapping[str, Any]]) -> StorageUsage:
    """Storage that these items take of their tenant's quota."""
    return StorageUsage(items=len(rows), bytes=sum(row["bytes"] for row in rows))


async def append(db: AsyncConnection, conversation: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Adds items that are not there yet at the end, if the conversation has not been deleted meanwhile."""
    if not rows:
        return
    used = sa.case((conversations.c.held_by.is_(None), now()), else_=conversations.c.held_until)
    mine = sa.update(conversations).where(conversations.c.id == conversation)
    if not (await db.execute(mine.values(held_until=used))).rowcount:
        logger.warning("Conversation %s was deleted; %d items for it are dropped", conversation, len(rows))
        return
    c = conversation_items.c
    names = {row["id"] for row in rows}
    there = set((await db.execute(sa.select(c.id).where(c.conversation == conversation, c.id.in_(names)))).scalars())
    new: dict[str, Any] = {}
    for row in rows:
        if row["id"] not in there:
            new.setdefault(row["id"], row)
    if len(new) < len(rows):
        logger.info("Conversation %s keeps %d items as they are", conversation, len(rows) - len(new))
    if new:
        await db.execute(sa.insert(conversation_items), list(new.values()))
