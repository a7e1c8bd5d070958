"""The response store: responses, the events of background ones, conversations. SQLite by default, or PostgreSQL.

Several API servers may share one database. A row belongs to a tenant (a hash of the API key); for other keys it does
not exist. A response is committed before its client gets the last event, so neither `kill -9` nor (with SQLite's
`synchronous=FULL`) a power cut loses a completed response.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import make_url

from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.state import input_items
from vllm_gptoss.server.responses.state.clock import now
from vllm_gptoss.server.responses.state.container_store import ContainerStore, forget_old
from vllm_gptoss.server.responses.state.conversation_store import ConversationStore, append, rows_of
from vllm_gptoss.server.responses.state.database import Database, begin_now, check_columns, insert, keep_private
from vllm_gptoss.server.responses.state.event_store import EventStore, unfinished
from vllm_gptoss.server.responses.state.quotas import Quotas, StorageUsage, remove_responses
from vllm_gptoss.server.responses.state.stored import (
    UNFINISHED,
    LostError,
    Stored,
    StoreError,
    TooLargeError,
    row_key,
    stored_of,
)
from vllm_gptoss.server.responses.state.tables import events, item_index, responses, settings
from vllm_gptoss.server.responses.state.upgrade import upgrade

logger = logging.getLogger(__name__)


class Store:
    """The database. `open()` before use; every method raises `StoreError` when the database does."""

    def __init__(self, config: ResponsesOptions) -> None:
        if config.url is None:
            raise ValueError("the store is off")
        self.config = config
        self._url = make_url(config.url)
        self.address = self._url.render_as_string(hide_password=True)
        self._db = Database(self._url, config.key_waiting, config.max_waiting)
        self.quotas = Quotas(self._db, config)
        self.conversations = ConversationStore(self._db, self.quotas)
        self.background = EventStore(self._db)
        self.containers = ContainerStore(self._db)
        self._swept = 0.0
        self._sweeping: asyncio.Task[None] | None = None
        self._closing = False

    async def open(self) -> None:
        """Creates or upgrades the tables. Raises `StoreError` with the store's address and a remedy."""
        try:
            if self._url.get_backend_name() == "sqlite" and self._url.database:
                keep_private(Path(self._url.database))
            for pause_s in (0.2, 0.4):
                with suppress(StoreError):  # another server creates SQLite's file concurrently
                    await self._db.run(upgrade)
                    break
                await asyncio.sleep(pause_s)
            else:
                await self._db.run(upgrade)
            await self._db.run(check_columns)
        except (StoreError, OSError) as error:
            message = f"{error} (the store is {self.address}; GPTOSS_STORE names another, or `off`)"
            raise StoreError(message) from error

    async def aclose(self) -> None:
        """Closes the database's connections, with no transaction left open: it would lock the file for others."""
        self._closing = True
        if self._sweeping:
            await asyncio.wait([self._sweeping])
        await self._db.aclose()

    async def setting(self, name: str, fresh: str | None = None) -> str | None:
        """The value of `name`. If it is unset, stores and returns `fresh`, if given. Safe with several servers."""
        query = sa.select(settings.c.value).where(settings.c.name == name)

        def read(db: sa.Connection) -> str | None:
            if fresh is not None and db.scalar(query) is None:
                db.execute(insert(db, settings).values(name=name, value=fresh).on_conflict_do_nothing())
            return db.scalar(query)

        return await self._db.run(read)

    # Responses

    async def save(self, stored: Stored, conversation: str | None = None) -> None:
        """Writes a new response; with `conversation`, appends its input and output to it at once.

        Raises:
            TakenError: the tenant has a response of this id.
        """
        row = self._checked_row(stored)
        if row["beat"] is None and stored.status in UNFINISHED:
            row["beat"] = now()

        def write(db: sa.Connection) -> None:
            packed = input_items.pack(db, stored)
            size = row["bytes"] - len(row["input"]) + len(packed)
            db.execute(sa.insert(responses).values(row | {"input": packed, "bytes": size}))
            _write_items(db, stored, conversation)

        usage = StorageUsage(responses=1, items=len(stored.input), bytes=row["bytes"])
        await self._write(stored.tenant, usage, write)

    async def update(self, stored: Stored, conversation: str | None = None) -> None:
        """Writes a changed background response, while it is unfinished.

        Raises:
            LostError: it was deleted, or ended by another server. Nothing is written.
        """
        row = self._checked_row(stored)

        def write(db: sa.Connection) -> None:
            kept = {name: value for name, value in row.items() if name not in ("id", "created", "input")}
            own_events = sa.select(sa.func.coalesce(sa.func.sum(sa.func.length(events.c.data)), 0))
            of_events = own_events.where(events.c.response == stored.key).scalar_subquery()
            kept["bytes"] = sa.func.length(responses.c.input) + row["bytes"] - len(row["input"]) + of_events
            kept["beat"] = now()
            mine = unfinished(stored.key) & (responses.c.tenant == stored.tenant)
            if not db.execute(sa.update(responses).where(mine).values(kept)).rowcount:
                raise LostError("The response was deleted, or ended by another server.")
            _write_items(db, stored, conversation)

        await self._write(stored.tenant, StorageUsage(bytes=row["bytes"]), write)

    async def _write(self, tenant: str, usage: StorageUsage, work: Callable[[sa.Connection], None]) -> None:
        self.quotas.add(tenant, usage)  # before: a client that disconnects meanwhile does not escape the quota
        try:
            await self._db.run(work)
        except StoreError:
            self.quotas.add(tenant, StorageUsage(*(-amount for amount in astuple(usage))))
            raise
        await self._settle(tenant)

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

        def read(db: sa.Connection) -> Stored | None:
            begin_now(db)
            row = db.execute(query).first()
            if row is None or self._expired(row.created):
                return None
            return stored_of(row, input_items.load(db, input_items.entries_of(row.input)))

        return await self._db.run(read, is_read=True)

    def _expired(self, created: float) -> bool:
        return bool(self.config.retention) and created < time.time() - self.config.retention

    async def exists(self, tenant: str, identifier: str) -> bool:
        """Whether the tenant has a response of this id."""
        query = sa.select(responses.c.id).where(responses.c.id == row_key(tenant, identifier))
        return bool(await self._db.rows(query))

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
                rows |= {row.id: row for row in await self._db.rows(query)}
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
        if after is not None:
            query = sa.select(item_index.c.response).where(item_index.c.id == after)
            first_with = {row.response for row in await self._db.rows(query)}
            # An item that another chain had first is indexed there only: then all turns are searched.
            begin = next((i for i, key in enumerate(keys) if key in first_with), 0)
        items: list[dict[str, Any]] = []

        def read(key: str, after: str | None, most: int, db: sa.Connection) -> list[dict[str, Any]] | None:
            begin_now(db)
            entries = _entries(db, key, with_output=key != own)
            entries = entries if ascending else entries[::-1]
            if after is not None:
                if (index := input_items.index_of(db, entries, after)) is None:
                    return None
                entries = entries[index + 1 :]
            return input_items.load(db, entries[:most])

        for key in keys[begin:]:
            page = await self._db.run(functools.partial(read, key, after, limit - len(items)), is_read=True)
            if page is not None:
                after, items = None, items + page
            if len(items) == limit:
                break
        return items if after is None else None

    async def delete(self, tenant: str, identifier: str) -> bool:
        """Removes a response with its events; False if the tenant has no response of this id."""
        key = row_key(tenant, identifier)
        where = (responses.c.id == key) & (responses.c.tenant == tenant)

        def remove(db: sa.Connection) -> bool:
            gone = bool(db.execute(sa.delete(responses).where(where)).rowcount)
            if gone:
                remove_responses(db, [key])
            return gone

        return await self._db.run(remove)

    async def find_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, tuple[dict[str, Any], Any]]:
        """Items of stored responses by id, each with its hidden data; unknown ids are left out."""
        query = sa.select(item_index.c.response).where(item_index.c.id.in_(item_ids)).distinct()
        found: dict[str, tuple[dict[str, Any], Any]] = {}
        for row in await self._db.rows(query) if item_ids else ():
            if stored := await self._get(tenant, row.response):
                for item, _ in stored.items_with_hidden():
                    hidden = stored.hidden.get(item["id"])
                    # A response that only got an echo of the item has no hidden data of it.
                    if item["id"] in item_ids and (hidden or item["id"] not in found):
                        found[item["id"]] = (item, hidden)
        return found

    # Limits

    async def _settle(self, tenant: str) -> None:
        """Applies the key's quota now; retention and the total in a task, once a minute or when the store is full.

        Failures are logged only: the response is stored.
        """
        try:
            await self.quotas.settle(tenant)
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
        gone = 0
        expired = sa.select(responses.c.id).where(responses.c.created < time.time() - self.config.retention)

        def remove(db: sa.Connection) -> int:
            part = list(db.scalars(expired.limit(500)))
            remove_responses(db, part)
            forget_old(db, self.config.retention)
            return len(part)

        while self.config.retention and not self._closing:
            removed = await self._db.run(remove)
            gone += removed
            if not removed:
                break
        if not self._closing:
            await self.quotas.fit_total()
        return gone


def _entries(db: sa.Connection, key: str, *, with_output: bool) -> list[input_items.Entry]:
    """Entries of a response's input, and `with_output` its output items; empty if it was deleted meanwhile."""
    columns = (responses.c.input, responses.c.body)[: 1 + with_output]
    row = db.execute(sa.select(*columns).where(responses.c.id == key)).first()
    if row is None:
        return []
    return input_items.entries_of(row.input) + (json.loads(row.body)["output"] if with_output else [])


def _write_items(db: sa.Connection, stored: Stored, conversation: str | None) -> None:
    """Writes the index of a finished response's items, and appends them to its conversation."""
    if stored.status not in UNFINISHED:
        every = {item["id"] for item in (*stored.input, *stored.body["output"])}
        # Items are indexed where they were first: else a lookup of an echoed history would read every turn.
        known = sa.select(item_index.c.id).join(responses, responses.c.id == item_index.c.response)
        mine = known.where(responses.c.tenant == stored.tenant, item_index.c.id.in_(every))
        if new := every - set(db.scalars(mine)):
            db.execute(sa.insert(item_index), [{"id": i, "response": stored.key} for i in new])
    if conversation:
        append(db, conversation, rows_of(conversation, stored.items_with_hidden()))
