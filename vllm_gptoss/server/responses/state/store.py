"""The response store: responses, the events of background ones, conversations. SQLite by default, or PostgreSQL.

Several API servers may share one database. A row belongs to a tenant (a hash of the API key); for other keys it does
not exist. A response is committed before its client gets the last event, so neither `kill -9` nor (with SQLite's
`synchronous=FULL`) a power cut loses a completed response.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.state import input_items
from vllm_gptoss.server.responses.state.clock import now
from vllm_gptoss.server.responses.state.container_store import ContainerStore, forget_old
from vllm_gptoss.server.responses.state.conversation_store import ConversationStore, append, rows_of
from vllm_gptoss.server.responses.state.database import cause_of, check_columns, connect, keep_private
from vllm_gptoss.server.responses.state.event_store import EventStore, unfinished
from vllm_gptoss.server.responses.state.quotas import Quotas, StorageUsage, remove_responses
from vllm_gptoss.server.responses.state.shielding import shield_methods
from vllm_gptoss.server.responses.state.stored import (
    UNFINISHED,
    LostError,
    Stored,
    StoreError,
    TakenError,
    TooLargeError,
    row_key,
    stored_of,
)
from vllm_gptoss.server.responses.state.tables import events, item_index, responses, settings
from vllm_gptoss.server.responses.state.upgrade import upgrade
from vllm_gptoss.tools.protocol import CALLER
from vllm_gptoss.tools.slots import Slots

logger = logging.getLogger(__name__)

AT_ONCE = {True: 1, False: 15}
"""Concurrent transactions; key: is it SQLite. SQLite has one writer, and others poll: `Slots` gives fair turns."""

T = TypeVar("T")


@shield_methods
class Store:
    """The database. `open()` before use; every method raises `StoreError` when the database does."""

    def __init__(self, config: ResponsesOptions) -> None:
        if config.url is None:
            raise ValueError("the store is off")
        self.config = config
        self._url = make_url(config.url)
        self._db = connect(self._url)
        self.quotas = Quotas(self._begin, config)
        self.conversations = ConversationStore(self._begin, self.quotas)
        self.background = EventStore(self._begin)
        self.containers = ContainerStore(self._begin)
        self._slots = Slots(AT_ONCE[self._url.get_backend_name() == "sqlite"])
        self._swept = 0.0
        self._sweeping: asyncio.Task[None] | None = None
        self._closing = False

    async def open(self) -> None:
        """Creates or upgrades the tables. Raises `StoreError` with the store's address and a remedy."""
        try:
            await self._create()
        except (StoreError, OSError) as error:
            where = self._url.render_as_string(hide_password=True)
            message = f"{error} (the store is {where}; GPTOSS_STORE names another, or `off`)"
            raise StoreError(message) from error

    async def _create(self) -> None:
        if self._url.get_backend_name() == "sqlite" and self._url.database:
            keep_private(Path(self._url.database))
        for attempt in range(3):
            try:
                async with self._begin() as db:
                    await db.run_sync(upgrade)
                break
            except (TakenError, StoreError):  # another server creates SQLite's file concurrently
                if attempt == 2:
                    raise
                await asyncio.sleep(0.2 * (attempt + 1))
        async with self._begin() as db:
            await db.run_sync(check_columns)

    async def aclose(self) -> None:
        """Closes the database's connections, with no transaction left open: it would lock the file for others."""
        self._closing = True
        if self._sweeping:  # not cancelled: SQLAlchemy would drop its connection inside a transaction
            await asyncio.wait([self._sweeping])
        await self._db.dispose()

    @asynccontextmanager
    async def _begin(self) -> AsyncIterator[AsyncConnection]:
        try:
            async with self._slots.one(CALLER.get()), self._db.begin() as connection:
                yield connection
        except IntegrityError as error:
            raise TakenError("There is a row of this id already.") from error
        except (SQLAlchemyError, OSError) as error:
            raise StoreError(f"The response store failed: {error.__class__.__name__}: {cause_of(error)}") from error

    async def setting(self, name: str, fresh: str | None = None) -> str | None:
        """The value of `name`. If it is unset, stores and returns `fresh`, if given. Safe with several servers."""
        query = sa.select(settings.c.value).where(settings.c.name == name)
        async with self._begin() as db:
            if (value := await db.scalar(query)) is not None:
                return str(value)
        if fresh is None:
            return None
        try:
            async with self._begin() as db:
                await db.execute(sa.insert(settings).values(name=name, value=fresh))
        except StoreError:
            logger.info("Another server has just written the setting %s", name)
        async with self._begin() as db:
            return str(await db.scalar(query))

    # Responses

    async def save(self, stored: Stored, conversation: str | None = None) -> None:
        """Writes a new response; with `conversation`, appends its input and output to it at once.

        Raises:
            TakenError: the tenant has a response of this id.
        """
        row = self._checked_row(stored)
        if row["beat"] is None and stored.status in UNFINISHED:
            row["beat"] = now()

        async def insert() -> None:
            async with self._begin() as db:
                await db.execute(sa.insert(responses).values(row | {"input": "[]"}))
                packed = await input_items.pack(db, stored)
                size = row["bytes"] - len(row["input"]) + len(packed)
                mine = responses.c.id == stored.key
                await db.execute(sa.update(responses).where(mine).values(input=packed, bytes=size))
                await _write_items(db, stored, conversation)

        await _retried(insert)
        await self._settle(stored.tenant, StorageUsage(responses=1, items=len(stored.input), bytes=row["bytes"]))

    async def update(self, stored: Stored, conversation: str | None = None) -> None:
        """Writes a changed background response, while it is unfinished.

        Raises:
            LostError: it was deleted, or ended by another server. Nothing is written.
        """
        row = self._checked_row(stored) | {"beat": now()}
        kept = {name: value for name, value in row.items() if name not in ("id", "cancel", "created", "input")}
        own_events = sa.select(sa.func.coalesce(sa.func.sum(sa.func.length(events.c.data)), 0))
        of_events = own_events.where(events.c.response == stored.key).scalar_subquery()
        kept["bytes"] = sa.func.length(responses.c.input) + row["bytes"] - len(row["input"]) + of_events
        async with self._begin() as db:
            mine = unfinished(stored.key) & (responses.c.tenant == stored.tenant)
            changed = await db.execute(sa.update(responses).where(mine).values(kept))
            if changed.rowcount:
                await _write_items(db, stored, conversation)
        if not changed.rowcount:
            raise LostError("The response was deleted, or ended by another server.")
        await self._settle(stored.tenant, StorageUsage(bytes=row["bytes"]))

    def _checked_row(self, stored: Stored) -> dict[str, Any]:
        row = stored.row()
        size, limit = row["bytes"], min(self.config.max_response_bytes, self.config.bytes_of_key)
        if size > limit:
            raise TooLargeError(f"The response has {size} bytes; {limit} may be stored. Use 'store': false.")
        return row

    async def get(self, tenant: str, identifier: str) -> Stored | None:
        """A response of the tenant; None if there is none or it has expired."""
        return await self._get(tenant, row_key(tenant, identifier))

    async def _get(self, tenant: str, key: str) -> Stored | None:
        silent = now() - sa.func.coalesce(responses.c.beat, responses.c.created)
        query = sa.select(responses, silent.label("silent")).where(responses.c.id == key, responses.c.tenant == tenant)
        async with self._begin() as db:
            row = (await db.execute(query)).first()
            if row is None or self._expired(row._mapping["created"]):
                return None
            return stored_of(row, await input_items.load(db, input_items.entries_of(row._mapping["input"])))

    def _expired(self, created: float) -> bool:
        return bool(self.config.retention) and created < time.time() - self.config.retention

    async def exists(self, tenant: str, identifier: str) -> bool:
        """Whether the tenant has a response of this id."""
        query = sa.select(responses.c.id).where(responses.c.id == row_key(tenant, identifier))
        async with self._begin() as db:
            return await db.scalar(query) is not None

    async def chain(self, tenant: str, identifier: str) -> list[Stored] | None:
        """The response and all before it, oldest first; None if one of them is deleted or of another tenant."""
        keys = await self.chain_keys(tenant, identifier)
        chain = [stored for key in reversed(keys) if (stored := await self._get(tenant, key))]
        return chain if chain and len(chain) == len(keys) and not chain[0].previous else None

    async def chain_keys(self, tenant: str, identifier: str) -> list[str]:
        """Keys of the response and of those before it, newest first, up to one that was deleted or has expired."""
        c = responses.c
        key: str | None = row_key(tenant, identifier)
        rows: dict[str, sa.Row[Any]] = {}
        keys: list[str] = []
        while key:
            if key not in rows:  # once for most chains: their responses have one root
                root = sa.select(c.root).where(c.id == key).scalar_subquery()
                query = sa.select(c.id, c.previous, c.created).where(c.tenant == tenant, c.root == root)
                async with self._begin() as db:
                    rows |= {row.id: row for row in await db.execute(query)}
            row = rows.get(key)
            if row is None or self._expired(row.created):
                break
            keys.append(key)
            key = row_key(tenant, row.previous) if row.previous else None
        return keys

    async def input_page(
        self, keys: Sequence[str], limit: int, after: str | None, *, ascending: bool
    ) -> list[dict[str, Any]] | None:
        """Up to `limit` input items of the response with these `chain_keys`, in either order, after item `after`.

        They are the input and output of the responses before it, then its own input. Only responses that the page needs
        are read. None if there is no item `after`.
        """
        own, begin = keys[0], 0
        keys = keys[::-1] if ascending else keys
        async with self._begin() as db:
            if after is not None:
                query = sa.select(item_index.c.response).where(item_index.c.id == after)
                first_with = set((await db.execute(query)).scalars())
                # An item that another chain had first is indexed there only: then all turns are searched.
                begin = next((i for i, key in enumerate(keys) if key in first_with), 0)
        items: list[dict[str, Any]] = []
        for key in keys[begin:]:
            async with self._begin() as db:
                entries = await _entries(db, key, with_output=key != own)
                entries = entries if ascending else entries[::-1]
                if after is not None:
                    if (index := await input_items.index_of(db, entries, after)) is None:
                        continue
                    entries, after = entries[index + 1 :], None
                items += await input_items.load(db, entries[: limit - len(items)])
            if len(items) == limit:
                break
        return items if after is None else None

    async def delete(self, tenant: str, identifier: str) -> bool:
        """Removes a response with its events; False if the tenant has no response of this id."""
        key = row_key(tenant, identifier)
        where = (responses.c.id == key) & (responses.c.tenant == tenant)

        async def remove() -> bool:
            async with self._begin() as db:
                gone = (await db.execute(sa.delete(responses).where(where))).rowcount
                if gone:
                    await remove_responses(db, [key])
            return bool(gone)

        return await _retried(remove)

    async def find_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, tuple[dict[str, Any], Any]]:
        """Items of stored responses by id, each with its hidden data; unknown ids are left out."""
        query = sa.select(item_index.c.response).where(item_index.c.id.in_(item_ids)).distinct()
        async with self._begin() as db:
            owners = (await db.execute(query)).scalars().all() if item_ids else []
        found: dict[str, tuple[dict[str, Any], Any]] = {}
        for owner in owners:
            if stored := await self._get(tenant, owner):
                for item, _ in stored.items_with_hidden():
                    hidden = stored.hidden.get(item["id"])
                    # A response that only got an echo of the item has no hidden data of it.
                    if item["id"] in item_ids and (hidden or item["id"] not in found):
                        found[item["id"]] = (item, hidden)
        return found

    # Limits

    async def _settle(self, tenant: str, more: StorageUsage) -> None:
        """Applies the key's quota now; retention and the total in a task, once a minute or when the store is full.

        Failures are logged only: the response is stored.
        """
        try:
            await self.quotas.settle(tenant, more)
        except StoreError as error:
            logger.warning("Response store: could not count the data of a key: %s", error)
        is_early = time.monotonic() - self._swept < 60 and not self.quotas.is_full
        if is_early or (self._sweeping and not self._sweeping.done()):
            return
        self._swept = time.monotonic()
        self._sweeping = asyncio.create_task(self._sweep_logged())

    async def _sweep_logged(self) -> None:
        try:
            if gone := await self.sweep():
                logger.info("Response store: removed %d responses past retention", gone)
        except StoreError as error:
            logger.warning("Response store: could not sweep: %s", error)

    async def sweep(self) -> int:
        """Removes responses past retention, and returns how many; then evicts until all keys are within the total."""
        return await _retried(self._sweep)

    async def _sweep(self) -> int:
        gone = 0
        expired = sa.select(responses.c.id).where(responses.c.created < time.time() - self.config.retention)
        while self.config.retention and not self._closing:
            async with self._begin() as db:
                part = list((await db.execute(expired.limit(500))).scalars())
                await remove_responses(db, part)
                await forget_old(db, self.config.retention)
            gone += len(part)
            if not part:
                break
        if not self._closing:
            await self.quotas.fit_total()
        return gone


async def _entries(db: AsyncConnection, key: str, *, with_output: bool) -> list[input_items.Entry]:
    """Entries of a response's input, and `with_output` its output items; empty if it was deleted meanwhile."""
    columns = (responses.c.input, responses.c.body)[: 1 + with_output]
    row = (await db.execute(sa.select(*columns).where(responses.c.id == key))).first()
    if row is None:
        return []
    return input_items.entries_of(row.input) + (json.loads(row.body)["output"] if with_output else [])


async def _retried(work: Callable[[], Awaitable[T]]) -> T:
    """`work`, retried if another server concurrently inserted or deleted an item that it uses."""
    for _ in range(2):
        try:
            return await work()
        except TakenError:
            continue
    return await work()


async def _write_items(db: AsyncConnection, stored: Stored, conversation: str | None) -> None:
    """Writes the index of a finished response's items, and appends them to its conversation."""
    if stored.status not in UNFINISHED:
        every = {item["id"] for item in (*stored.input, *stored.body["output"])}
        await db.execute(sa.delete(item_index).where(item_index.c.response == stored.key))
        # Items are indexed where they were first: else a lookup of an echoed history would read every turn.
        known = sa.select(item_index.c.id).join(responses, responses.c.id == item_index.c.response)
        mine = known.where(responses.c.tenant == stored.tenant, item_index.c.id.in_(every))
        if new := every - set((await db.execute(mine)).scalars()):
            await db.execute(sa.insert(item_index), [{"id": i, "response": stored.key} for i in new])
    if conversation:
        await append(db, conversation, rows_of(conversation, stored.items_with_hidden()))
