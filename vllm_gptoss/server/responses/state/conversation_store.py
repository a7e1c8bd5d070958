"""Stored conversations: their metadata, their items in order, and the response that holds each."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from vllm_gptoss.server.responses.state.clock import now
from vllm_gptoss.server.responses.state.database import Database
from vllm_gptoss.server.responses.state.quotas import Quotas, StorageUsage
from vllm_gptoss.server.responses.state.tables import conversation_items, conversations

logger = logging.getLogger(__name__)

PAGE = 500
"""Items that are read at once: 22,000 together stopped the event loop for a second."""

Items = Sequence[tuple[dict[str, Any], Any]]
"""Items, each with its hidden data."""


class ConversationStore:
    """Part of `Store`; every method raises `StoreError` when the database fails."""

    def __init__(self, db: Database, quotas: Quotas) -> None:
        self._db = db
        self._quotas = quotas

    async def put(
        self, tenant: str, identifier: str, labels: Mapping[str, str], created: float, items: Items = ()
    ) -> None:
        """Writes a conversation, new with its first items, or changed.

        Raises:
            QuotaError: the tenant may store no more.
        """
        row = {"id": identifier, "tenant": tenant, "created": created, "metadata": json.dumps(dict(labels))}
        change = sa.update(conversations).where(_mine(tenant, identifier)).values(metadata=row["metadata"])
        if await self._changes(change):
            return
        rows = rows_of(identifier, items)
        await self._quotas.make_room(tenant, usage_of(rows) + StorageUsage(conversations=1))

        def insert(db: sa.Connection) -> None:
            db.execute(sa.insert(conversations).values(row))
            append(db, identifier, rows)

        await self._db.run(insert)

    async def _changes(self, statement: sa.Update | sa.Delete) -> bool:
        """Executes `statement`; whether it changed a row."""
        return bool(await self._db.run(lambda db: db.execute(statement).rowcount))

    async def get(self, tenant: str, identifier: str) -> tuple[float, dict[str, str]] | None:
        """When the conversation was made (seconds since 1970) and its metadata; None if it is not the tenant's."""
        query = sa.select(conversations).where(_mine(tenant, identifier))
        rows = await self._db.rows(query)
        return next(((row.created, json.loads(row.metadata)) for row in rows), None)

    async def of_tenant(
        self, tenant: str, limit: int, after: str | None = None, *, ascending: bool = False
    ) -> Sequence[sa.Row[Any]]:
        """Up to `limit` of the tenant's conversations by time of creation, after the conversation `after`."""
        c = conversations.c
        query = sa.select(conversations).where(c.tenant == tenant).limit(limit)
        order = (c.created, c.id) if ascending else (c.created.desc(), c.id.desc())
        if after is not None:
            key, last = sa.tuple_(c.created, c.id), sa.select(c.created, c.id).where(_mine(tenant, after))
            query = query.where(key > last.scalar_subquery() if ascending else key < last.scalar_subquery())
        return await self._db.rows(query.order_by(*order))

    async def delete(self, tenant: str, identifier: str) -> bool:
        """Removes a conversation with its items; False if it is not the tenant's."""

        def remove(db: sa.Connection) -> bool:
            gone = bool(db.execute(sa.delete(conversations).where(_mine(tenant, identifier))).rowcount)
            if gone:
                db.execute(sa.delete(conversation_items).where(conversation_items.c.conversation == identifier))
            return gone

        return await self._db.run(remove)

    async def append(self, identifier: str, items: Items, tenant: str = "") -> None:
        """Adds items at the end; without effect if the conversation was deleted.

        `tenant`: the owner, for its quota. It is empty for items of a finished response, which are always stored.

        Raises:
            QuotaError: the tenant's quota is used up.
        """
        rows = rows_of(identifier, items)
        if tenant:
            await self._quotas.make_room(tenant, usage_of(rows))
        await self._db.run(lambda db: append(db, identifier, rows))

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
        return await self._db.rows(query)

    async def positions(self, identifier: str, *items: str) -> dict[str, int]:
        """Positions in the conversation by id, of those `items` that it has."""
        c = conversation_items.c
        query = sa.select(c.id, c.position).where(c.conversation == identifier, c.id.in_(items))
        return {row.id: row.position for row in await self._db.rows(query)}

    async def delete_item(self, identifier: str, item: str) -> bool:
        """Removes one item; False if it is not there."""
        where = (conversation_items.c.conversation == identifier) & (conversation_items.c.id == item)
        return await self._changes(sa.delete(conversation_items).where(where))

    async def hold(self, tenant: str, identifier: str, holder: str, seconds: float) -> bool:
        """Locks the conversation for `holder`, or renews that; False if another holder has it, or it does not exist."""
        c = conversations.c
        free = c.held_by.is_(None) | (c.held_by == holder) | (c.held_until < now())
        held = sa.update(conversations).where(_mine(tenant, identifier) & free)
        return await self._changes(held.values(held_by=holder, held_until=now() + seconds))

    async def release(self, identifier: str, holder: str) -> None:
        """Unlocks the conversation, if `holder` has it, and stores the time."""
        mine = (conversations.c.id == identifier) & (conversations.c.held_by == holder)
        await self._changes(sa.update(conversations).where(mine).values(held_by=None, held_until=now()))


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


def append(db: sa.Connection, conversation: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Adds items that are not there yet at the end, if the conversation has not been deleted meanwhile."""
    if not rows:
        return
    used = sa.case((conversations.c.held_by.is_(None), now()), else_=conversations.c.held_until)
    mine = sa.update(conversations).where(conversations.c.id == conversation)
    if not db.execute(mine.values(held_until=used)).rowcount:
        logger.warning("Conversation %s was deleted; %d items for it are dropped", conversation, len(rows))
        return
    c = conversation_items.c
    names = {row["id"] for row in rows}
    there = set(db.scalars(sa.select(c.id).where(c.conversation == conversation, c.id.in_(names))))
    new: dict[str, Any] = {}
    for row in rows:
        if row["id"] not in there:
            new.setdefault(row["id"], row)
    if len(new) < len(rows):
        logger.info("Conversation %s keeps %d items as they are", conversation, len(rows) - len(new))
    if new:
        db.execute(sa.insert(conversation_items), list(new.values()))
