"""How much each API key, and all together, may store.

If a key exceeds its quota, its responses are evicted, the least recently used chain first. Conversations are not
evicted: an addition above the quota is refused. If all keys exceed the total, data of the largest key is evicted.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import sqlalchemy as sa

from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.state import input_items
from vllm_gptoss.server.responses.state.database import Database
from vllm_gptoss.server.responses.state.stored import UNFINISHED, QuotaError
from vllm_gptoss.server.responses.state.tables import conversation_items, conversations, events, item_index, responses
from vllm_gptoss.server.responses.state.tables import input_items as inputs

logger = logging.getLogger(__name__)

_RECOUNT_S = 30.0
_TENANTS = 4096
_BATCH = 512


@dataclass(frozen=True, slots=True)
class StorageUsage:
    """Amounts of stored data. `items`: of conversations, and distinct input items of responses."""

    responses: int = 0
    conversations: int = 0
    items: int = 0
    bytes: int = 0

    def __add__(self, other: StorageUsage) -> StorageUsage:
        return StorageUsage(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def exceeded(self, limits: StorageUsage) -> str:
        """The first field that is more than its limit; empty where none is."""
        over = (name for name in self.__slots__ if getattr(self, name) > getattr(limits, name))
        return next(over, "")


class Quotas:
    """Part of `Store`; every method raises `StoreError` when the database fails.

    Counts are cached for 30 s with this server's own additions, and read again before an eviction or a refusal.
    """

    def __init__(self, db: Database, options: ResponsesOptions) -> None:
        self._db = db
        o = options
        self._per_key = StorageUsage(o.key_responses, o.key_conversations, o.key_items, o.bytes_of_key)
        self._in_total = StorageUsage(o.max_responses, o.max_conversations, o.max_items, o.max_bytes)
        self._known: OrderedDict[str | None, tuple[StorageUsage, float]] = OrderedDict()
        self._evicting = asyncio.Lock()

    async def make_room(self, tenant: str, more: StorageUsage) -> None:
        """Before a conversation grows: evicts responses of the tenant's where that helps.

        Raises:
            QuotaError: the tenant's conversations alone fill its quota, or all keys the total; the message names it.
        """
        for each, limits, prefix in ((tenant, self._per_key, "KEY"), (None, self._in_total, "MAX")):
            if (await self._usage(each) + more).exceeded(limits) and (name := await self._evict(each, more)):
                whose = "This API key" if each else "This server"
                setting = f"GPTOSS_RESPONSES_{prefix}_{name.upper()}"
                raise QuotaError(f"{whose} may store {getattr(limits, name)} {name} ({setting}): delete conversations.")
        self.add(tenant, more)

    async def settle(self, tenant: str) -> None:
        """After a response was stored: evicts the tenant's least recently used ones where it is over its quota."""
        if (await self._usage(tenant)).exceeded(self._per_key):
            await self._evict(tenant)

    @property
    def is_full(self) -> bool:
        """Whether all keys together are over the total, as far as this server knows."""
        known = self._known.get(None)
        return known is not None and bool(known[0].exceeded(self._in_total))

    async def fit_total(self) -> None:
        """Evicts from the largest key, again and again, until all keys together are within the total."""
        if (await self._recount(None)).exceeded(self._in_total):
            await self._evict(None)

    async def _evict(self, tenant: str | None, more: StorageUsage | None = None) -> str:
        """Evicts down to 95 % of the quota, or of the total for None; returns the field still exceeded, or ""."""
        more, limits = more or StorageUsage(), self._per_key if tenant else self._in_total
        aim = StorageUsage(*(limit - limit // 20 for limit in astuple(limits)))
        batch = 1
        async with self._evicting:
            while name := (await self._recount(tenant) + more).exceeded(aim):
                if not await self._db.run(functools.partial(_evict, tenant, name, batch)):
                    break
                batch = min(2 * batch, _BATCH)
            return (self._known[tenant][0] + more).exceeded(limits)

    async def _usage(self, tenant: str | None) -> StorageUsage:
        known = self._known.get(tenant)
        return known[0] if known and time.monotonic() - known[1] < _RECOUNT_S else await self._recount(tenant)

    async def _recount(self, tenant: str | None) -> StorageUsage:
        usage = await self._db.run(lambda db: _counted(db, tenant), is_read=True)
        self._known[tenant] = usage, time.monotonic()
        self._known.move_to_end(tenant)
        while len(self._known) > _TENANTS:
            self._known.popitem(last=False)
        return usage

    def add(self, tenant: str, more: StorageUsage) -> None:
        """Counts data that is being written."""
        for each in (tenant, None):
            if known := self._known.get(each):
                self._known[each] = known[0] + more, known[1]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Rows that count for `fields` of `StorageUsage`; `table` is where their tenant is, too."""

    table: sa.FromClause
    tenant: sa.ColumnElement[str]
    bytes: sa.ColumnElement[int]
    fields: Sequence[str]


_OF_ITEMS = conversation_items.join(conversations, conversations.c.id == conversation_items.c.conversation)
_KINDS = (
    _Kind(responses, responses.c.tenant, responses.c.bytes, ("responses", "bytes")),
    _Kind(conversations, conversations.c.tenant, sa.literal(0), ("conversations",)),
    _Kind(_OF_ITEMS, conversations.c.tenant, conversation_items.c.bytes, ("items", "bytes")),
    _Kind(inputs, inputs.c.tenant, inputs.c.bytes, ("items", "bytes")),
)


def _counted(db: sa.Connection, tenant: str | None) -> StorageUsage:
    """Amounts that a tenant stores, or all tenants for None."""
    usage = StorageUsage()
    for kind in _KINDS:
        query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(kind.bytes), 0)).select_from(kind.table)
        number, size = db.execute(query if tenant is None else query.where(kind.tenant == tenant)).one()
        usage += StorageUsage(**{name: int(size) if name == "bytes" else number for name in kind.fields})
    return usage


def _evict(tenant: str | None, name: str, batch: int, db: sa.Connection) -> int:
    """Removes rows that count for the field `name`, of the tenant or for None of the largest; how many went."""
    victim = tenant or _largest(db, name)
    gone = 0 if name == "conversations" else _evict_responses(db, victim, batch)
    if not gone and tenant is None:
        gone = _evict_conversation(db, victim)
    if gone:
        logger.info("Response store: %d rows of the key %s go, over the limit of %s", gone, victim[:8], name)
    return gone


def _largest(db: sa.Connection, name: str) -> str:
    """The tenant that has most of a field of `StorageUsage`."""
    parts = []
    for kind in (kind for kind in _KINDS if name in kind.fields):
        amount = sa.func.sum(kind.bytes) if name == "bytes" else sa.func.count()
        query = sa.select(kind.tenant.label("tenant"), amount.label("amount"))
        parts.append(query.select_from(kind.table).group_by(kind.tenant))
    rows = sa.union_all(*parts).subquery()
    most = sa.select(rows.c.tenant).where(rows.c.tenant.is_not(None)).group_by(rows.c.tenant)
    return str(db.scalar(most.order_by(sa.func.sum(rows.c.amount).desc()).limit(1)))


def _evict_responses(db: sa.Connection, tenant: str, batch: int) -> int:
    """Removes up to `batch` responses, those of the least recently used chains first; how many went."""
    c = responses.c
    used = sa.select(c.root, sa.func.max(c.created).label("used")).where(c.tenant == tenant).group_by(c.root).subquery()
    query = sa.select(c.id).join(used, used.c.root == c.root)
    query = query.where(c.tenant == tenant, c.status.not_in(UNFINISHED)).order_by(used.c.used, c.created)
    keys = list(db.scalars(query.limit(batch)))
    remove_responses(db, keys)
    return len(keys)


def _evict_conversation(db: sa.Connection, tenant: str) -> int:
    """Removes the tenant's least recently used conversation; how many went, 0 or 1."""
    c = conversations.c
    query = sa.select(c.id).where(c.tenant == tenant, c.held_by.is_(None))
    oldest = db.scalar(query.order_by(sa.func.coalesce(c.held_until, c.created)).limit(1))
    if oldest is None:
        return 0
    db.execute(sa.delete(conversations).where(c.id == oldest))
    db.execute(sa.delete(conversation_items).where(conversation_items.c.conversation == oldest))
    return 1


def remove_responses(db: sa.Connection, keys: Sequence[str]) -> None:
    """Removes responses with their events, items and index."""
    db.execute(sa.delete(events).where(events.c.response.in_(keys)))
    db.execute(sa.delete(item_index).where(item_index.c.response.in_(keys)))
    input_items.forget(db, keys)
    db.execute(sa.delete(responses).where(responses.c.id.in_(keys)))
