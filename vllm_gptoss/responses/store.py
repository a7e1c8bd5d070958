"""What outlives a request: responses, the events of background ones, conversations. SQLite by default, or PostgreSQL.

Several API servers may share one database. A row belongs to a tenant (a hash of the API key); whoever asks with another
key is told that it does not exist. A response is committed before its client hears that it is complete, so neither
`kill -9` nor (with SQLite's `synchronous=FULL`) a power cut loses one that was reported.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from vllm_gptoss.responses.config import ResponsesConfig
from vllm_gptoss.responses.conversation_store import ConversationStore, append, size
from vllm_gptoss.responses.tables import (
    events,
    item_index,
    metadata,
    responses,
    settings,
)
from vllm_gptoss.responses.unbroken import unbroken

logger = logging.getLogger(__name__)


UNFINISHED = ("queued", "in_progress")


class StoreError(Exception):
    """The database refused: full disk, gone, locked for too long, or the size limit is reached."""


@dataclass(slots=True)
class Stored:
    """A response as it is kept.

    `body` is the response object; `input` this request's own input items. `hidden` maps an output item's id to what the
    model saw and the API does not show (a tool's text), so that a later turn has the whole history. `root` is the first
    response of the chain, which tool sessions are keyed by. `created` has fractions of a second, unlike the body's
    `created_at`: the oldest must be known among those of one second.
    """

    id: str
    tenant: str
    body: dict[str, Any]
    input: list[dict[str, Any]] = field(default_factory=list)
    hidden: dict[str, Any] = field(default_factory=dict)
    previous: str | None = None
    root: str = ""
    created: float = field(default_factory=time.time)
    beat: float | None = None
    cancel: bool = False

    @property
    def status(self) -> str:
        return str(self.body["status"])

    def row(self) -> dict[str, Any]:
        body, own, hidden = json.dumps(self.body), json.dumps(self.input), json.dumps(self.hidden)
        return {
            "id": self.id,
            "tenant": self.tenant,
            "created": self.created,
            "status": self.status,
            "previous": self.previous,
            "root": self.root or self.id,
            "body": body,
            "input": own,
            "hidden": hidden,
            "bytes": len(body) + len(own) + len(hidden),
            "beat": self.beat,
            "cancel": self.cancel,
        }


def _stored(row: Any) -> Stored:
    m = row._mapping
    return Stored(
        m["id"],
        m["tenant"],
        json.loads(m["body"]),
        json.loads(m["input"]),
        json.loads(m["hidden"]),
        m["previous"],
        m["root"],
        m["created"],
        m["beat"],
        m["cancel"],
    )


@unbroken
class Store:
    """The database. `open()` before use; every method raises `StoreError` when the database does."""

    def __init__(self, config: ResponsesConfig) -> None:
        if config.url is None:
            raise ValueError("the store is off")
        self.config = config
        self._url = make_url(config.url)
        self._db = _engine(self._url)
        self.conversations = ConversationStore(self._begin)
        self._swept = 0.0
        self._sweeping: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Creates tables that are missing. Raises `StoreError` that says where, and what to do."""
        try:
            await self._create()
        except (StoreError, OSError) as error:
            where = self._url.render_as_string(hide_password=True)
            message = f"{error} (the store is {where}; GPTOSS_STORE names another, or `off`)"
            raise StoreError(message) from error

    async def _create(self) -> None:
        if self._url.get_backend_name() == "sqlite" and self._url.database:
            Path(self._url.database).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for attempt in range(3):
            try:
                async with self._begin() as db:
                    await db.run_sync(metadata.create_all)
                break
            except StoreError:  # several API servers start at once: another may just have made the tables
                if attempt == 2:
                    raise
                await asyncio.sleep(0.2 * (attempt + 1))
        async with self._begin() as db:
            await db.run_sync(_check_columns)

    async def aclose(self) -> None:
        if self._sweeping:
            self._sweeping.cancel()
        await self._db.dispose()

    @asynccontextmanager
    async def _begin(self) -> AsyncIterator[AsyncConnection]:
        try:
            async with self._db.begin() as connection:
                yield connection
        except (SQLAlchemyError, OSError) as error:
            raise StoreError(f"The response store failed: {error.__class__.__name__}: {_cause(error)}") from error

    async def setting(self, name: str, fresh: str) -> str:
        """The value kept under `name`; `fresh` becomes it when there is none. Safe among several servers."""
        query = sa.select(settings.c.value).where(settings.c.name == name)
        async with self._begin() as db:
            if (value := await db.scalar(query)) is not None:
                return str(value)
        try:
            async with self._begin() as db:
                await db.execute(sa.insert(settings).values(name=name, value=fresh))
        except StoreError:
            logger.info("Another server has just written the setting %s", name)
        async with self._begin() as db:
            return str(await db.scalar(query))

    # Responses

    async def save(self, stored: Stored, conversation: str | None = None) -> None:
        """Writes a response, new or changed; with `conversation`, appends its input and output to it at once."""
        row = stored.row()
        if row["bytes"] > self.config.max_response_bytes:
            size, limit = row["bytes"], self.config.max_response_bytes
            raise StoreError(f"The response has {size} bytes; {limit} may be stored. Use 'store': false.")
        async with self._begin() as db:
            kept = {name: value for name, value in row.items() if name not in ("id", "cancel")}
            mine = (responses.c.id == stored.id) & (responses.c.tenant == stored.tenant)
            changed = await db.execute(sa.update(responses).where(mine).values(kept))
            if not changed.rowcount:
                await db.execute(sa.insert(responses).values(row))
            if stored.status not in UNFINISHED:
                every = {item["id"] for item in (*stored.input, *stored.body["output"])}
                await db.execute(sa.delete(item_index).where(item_index.c.response == stored.id))
                if every:
                    await db.execute(sa.insert(item_index), [{"id": i, "response": stored.id} for i in every])
            if conversation:
                items = [(item, None) for item in stored.input]
                items += [(item, stored.hidden.get(item["id"])) for item in stored.body["output"]]
                await append(db, conversation, items)
        self._sweep_soon()

    async def get(self, tenant: str, identifier: str) -> Stored | None:
        query = sa.select(responses).where(responses.c.id == identifier, responses.c.tenant == tenant)
        async with self._begin() as db:
            row = (await db.execute(query)).first()
        return _stored(row) if row and not self._expired(row._mapping["created"]) else None

    def _expired(self, created: float) -> bool:
        return bool(self.config.retention) and created < time.time() - self.config.retention

    async def exists(self, identifier: str) -> bool:
        """Whether anybody has a response of this id."""
        async with self._begin() as db:
            return await db.scalar(sa.select(responses.c.id).where(responses.c.id == identifier)) is not None

    async def chain(self, tenant: str, identifier: str) -> list[Stored] | None:
        """The response and all before it, oldest first; None if one of them is gone or somebody else's."""
        chain: list[Stored] = []
        at: str | None = identifier
        while at:
            stored = await self.get(tenant, at)
            if stored is None:
                return None
            chain.append(stored)
            at = stored.previous
        return chain[::-1]

    async def delete(self, tenant: str, identifier: str) -> bool:
        where = (responses.c.id == identifier) & (responses.c.tenant == tenant)
        async with self._begin() as db:
            gone = (await db.execute(sa.delete(responses).where(where))).rowcount
            if gone:
                await db.execute(sa.delete(events).where(events.c.response == identifier))
                await db.execute(sa.delete(item_index).where(item_index.c.response == identifier))
        return bool(gone)

    async def find_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, tuple[dict[str, Any], Any]]:
        """Items of stored responses by id, each with what is hidden behind it; those not found are left out."""
        query = sa.select(item_index.c.response).where(item_index.c.id.in_(item_ids)).distinct()
        async with self._begin() as db:
            owners = (await db.execute(query)).scalars().all() if item_ids else []
        found: dict[str, tuple[dict[str, Any], Any]] = {}
        for owner in owners:
            if stored := await self.get(tenant, owner):
                both = [*stored.input, *stored.body["output"]]
                found |= {item["id"]: (item, stored.hidden.get(item["id"])) for item in both if item["id"] in item_ids}
        return found

    # Background

    async def request_cancel(self, tenant: str, identifier: str) -> None:
        where = (responses.c.id == identifier) & (responses.c.tenant == tenant)
        async with self._begin() as db:
            await db.execute(sa.update(responses).where(where).values(cancel=True))

    async def beat(self, identifier: str) -> bool:
        """Says that the response's server lives; True if somebody asked to cancel it."""
        async with self._begin() as db:
            await db.execute(sa.update(responses).where(responses.c.id == identifier).values(beat=time.time()))
            return bool(await db.scalar(sa.select(responses.c.cancel).where(responses.c.id == identifier)))

    async def append_events(self, identifier: str, batch: Sequence[tuple[int, str]]) -> None:
        rows = [{"response": identifier, "sequence": sequence, "data": data} for sequence, data in batch]
        async with self._begin() as db:
            await db.execute(sa.insert(events), rows)

    async def last_event(self, identifier: str) -> int:
        """The number of the last event of a response, -1 without any."""
        query = sa.select(sa.func.max(events.c.sequence)).where(events.c.response == identifier)
        async with self._begin() as db:
            last = await db.scalar(query)
        return -1 if last is None else int(last)

    async def events(self, identifier: str, after: int, limit: int = 500) -> list[tuple[int, str]]:
        where = (events.c.response == identifier) & (events.c.sequence > after)
        query = sa.select(events.c.sequence, events.c.data).where(where).order_by(events.c.sequence).limit(limit)
        async with self._begin() as db:
            return [(row.sequence, row.data) for row in await db.execute(query)]

    # Limits

    async def measure(self, identifier: str) -> None:
        """Counts the events of a background response, which has ended, into its size."""
        own = sa.select(sa.func.sum(sa.func.length(events.c.data))).where(events.c.response == identifier)
        kept = responses.c.bytes + sa.func.coalesce(own.scalar_subquery(), 0)
        async with self._begin() as db:
            await db.execute(sa.update(responses).where(responses.c.id == identifier).values(bytes=kept))

    def _sweep_soon(self) -> None:
        """Retention and the size limit, at most once a minute, off the request's path."""
        if time.monotonic() - self._swept < 60 or (self._sweeping and not self._sweeping.done()):
            return
        self._swept = time.monotonic()
        self._sweeping = asyncio.create_task(self._sweep_logged())

    async def _sweep_logged(self) -> None:
        try:
            if gone := await self.sweep():
                logger.info("Response store: removed %d responses past retention or the size limit", gone)
        except StoreError as error:
            logger.warning("Response store: could not sweep: %s", error)

    async def sweep(self) -> int:
        """Removes responses past retention, then the oldest until all fits `max_bytes`. Returns how many went."""
        async with self._begin() as db:
            query = sa.select(responses.c.id, responses.c.bytes, responses.c.created, responses.c.status)
            rows = (await db.execute(query.order_by(responses.c.created.desc()))).all()
            total, gone = await size(db), []
            if total > self.config.max_bytes:
                logger.warning("Response store: conversations have %d bytes and no response fits: delete some", total)
            for row in rows:
                total += row.bytes
                is_over = total > self.config.max_bytes and row.status not in UNFINISHED
                if is_over or self._expired(row.created):
                    gone.append(row.id)
            for at in range(0, len(gone), 500):
                part = gone[at : at + 500]
                await db.execute(sa.delete(events).where(events.c.response.in_(part)))
                await db.execute(sa.delete(item_index).where(item_index.c.response.in_(part)))
                await db.execute(sa.delete(responses).where(responses.c.id.in_(part)))
        return len(gone)


def _engine(url: sa.URL) -> AsyncEngine:
    if url.get_backend_name() != "sqlite":
        return create_async_engine(url, pool_pre_ping=True)
    db = create_async_engine(url, connect_args={"timeout": 30})

    @sa.event.listens_for(db.sync_engine, "connect")
    def _pragmas(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=30000", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    return db


def _check_columns(connection: sa.Connection) -> None:
    """Raises `StoreError` where a table is of another version."""
    there = sa.inspect(connection)
    for table in metadata.sorted_tables:
        columns = {column["name"] for column in there.get_columns(table.name)}
        if missing := sorted(set(table.columns.keys()) - columns):
            raise StoreError(f"Table {table.name} is of another version: it has no column {', '.join(missing)}")


def _cause(error: Exception) -> str:
    return str(error.orig) if isinstance(error, OperationalError) else str(error).split("\n", 1)[0]
