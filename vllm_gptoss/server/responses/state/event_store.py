"""Stored parts of background responses: their numbered events, and `beat`, when their server last worked on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from vllm_gptoss.server.responses.state.clock import now
from vllm_gptoss.server.responses.state.shielding import shield_methods
from vllm_gptoss.server.responses.state.stored import UNFINISHED, Stored, row_key
from vllm_gptoss.server.responses.state.tables import events, responses


@shield_methods
class EventStore:
    """Part of `Store`; `begin` opens a transaction, and raises `StoreError` when the database fails.

    `key` is a response's `Stored.key`.
    """

    def __init__(self, begin: Callable[[], AbstractAsyncContextManager[AsyncConnection]]) -> None:
        self._begin = begin

    async def request_cancel(self, tenant: str, identifier: str) -> None:
        """Sets the flag with which the server that runs a response cancels it."""
        where = (responses.c.id == row_key(tenant, identifier)) & (responses.c.tenant == tenant)
        async with self._begin() as db:
            await db.execute(sa.update(responses).where(where).values(cancel=True))

    async def beat(self, key: str) -> bool:
        """Updates `beat`; False if the server should stop the response: cancelled, deleted, or ended elsewhere."""
        async with self._begin() as db:
            mine = unfinished(key)
            lives = (await db.execute(sa.update(responses).where(mine).values(beat=now()))).rowcount
            cancel = await db.scalar(sa.select(responses.c.cancel).where(responses.c.id == key))
        return bool(lives) and not cancel

    async def give_up(self, stored: Stored, event: Callable[[int], str]) -> bool:
        """Ends a response after its server has died. `event` makes the last event's JSON from its number.

        False if `beat` has changed, so that one server does this. A slow server then finds that it has lost the
        response.
        """
        row = stored.row()
        seen = responses.c.beat.is_(None) if stored.beat is None else responses.c.beat == stored.beat
        async with self._begin() as db:
            changed = sa.update(responses).where(unfinished(stored.key) & seen)
            if not (await db.execute(changed.values(status=row["status"], body=row["body"]))).rowcount:
                return False
            number = await _last_event(db, stored.key) + 1
            last = {"response": stored.key, "sequence": number, "data": event(number)}
            await db.execute(sa.insert(events).values(last))
        return True

    async def append(self, key: str, batch: Sequence[tuple[int, str]], *, finished_here: bool = False) -> bool:
        """Adds numbered events, as JSON, to a background response, without those that are stored already.

        False, and nothing is written, if it was deleted or ended elsewhere. `finished_here`: this server has ended it.
        """
        mine = responses.c.id == key if finished_here else unfinished(key)
        async with self._begin() as db:
            # First, because it locks the row: no server deletes or ends the response until the events are stored.
            size = responses.c.bytes + sum(len(data) for _, data in batch)
            if not (await db.execute(sa.update(responses).where(mine).values(beat=now(), bytes=size))).rowcount:
                return False
            last = await _last_event(db, key)
            rows = [{"response": key, "sequence": n, "data": data} for n, data in batch if n > last]
            if rows:
                await db.execute(sa.insert(events), rows)
        return True

    async def last(self, key: str) -> tuple[int, str] | None:
        """The last event of a response as number and JSON; None without any."""
        query = sa.select(events).where(events.c.response == key).order_by(events.c.sequence.desc()).limit(1)
        async with self._begin() as db:
            row = (await db.execute(query)).first()
        return (row.sequence, row.data) if row else None

    async def since(self, key: str, after: int, limit: int = 500) -> list[tuple[int, str]]:
        """Up to `limit` events after number `after`, in order."""
        where = (events.c.response == key) & (events.c.sequence > after)
        query = sa.select(events.c.sequence, events.c.data).where(where).order_by(events.c.sequence).limit(limit)
        async with self._begin() as db:
            return [(row.sequence, row.data) for row in await db.execute(query)]


def unfinished(key: str) -> sa.ColumnElement[bool]:
    """The response, while it is unfinished."""
    return (responses.c.id == key) & responses.c.status.in_(UNFINISHED)


async def _last_event(db: AsyncConnection, key: str) -> int:
    """The number of the last event of a response, -1 without any."""
    last = await db.scalar(sa.select(sa.func.max(events.c.sequence)).where(events.c.response == key))
    return -1 if last is None else int(last)
