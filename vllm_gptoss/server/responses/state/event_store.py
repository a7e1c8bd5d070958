"""Stored parts of background responses: their numbered events, and `beat`, when their server last worked on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sqlalchemy as sa

from vllm_gptoss.server.responses.state.clock import now
from vllm_gptoss.server.responses.state.database import Database, insert
from vllm_gptoss.server.responses.state.stored import UNFINISHED, Stored, row_key
from vllm_gptoss.server.responses.state.tables import events, responses


class EventStore:
    """Part of `Store`; every method raises `StoreError` when the database fails.

    `key` is a response's `Stored.key`.
    """

    def __init__(self, db: Database) -> None:
        self._db = db

    async def request_cancel(self, tenant: str, identifier: str) -> None:
        """Sets the flag with which the server that runs a response cancels it."""
        where = (responses.c.id == row_key(tenant, identifier)) & (responses.c.tenant == tenant)
        await self._db.run(lambda db: db.execute(sa.update(responses).where(where).values(cancel=True)))

    async def beat(self, key: str) -> bool:
        """Updates `beat`; False if the server should stop the response: cancelled, deleted, or ended elsewhere."""

        def work(db: sa.Connection) -> bool:
            lives = db.execute(sa.update(responses).where(unfinished(key)).values(beat=now())).rowcount
            return bool(lives) and not db.scalar(sa.select(responses.c.cancel).where(responses.c.id == key))

        return await self._db.run(work)

    async def give_up(self, stored: Stored, event: Callable[[int], str]) -> bool:
        """Ends a response after its server has died. `event` makes the last event's JSON from its number.

        False if `beat` has changed, so that one server does this. A slow server then finds that it has lost the
        response.
        """
        row = stored.row()
        seen = responses.c.beat.is_(None) if stored.beat is None else responses.c.beat == stored.beat

        def end(db: sa.Connection) -> bool:
            changed = sa.update(responses).where(unfinished(stored.key) & seen)
            if not db.execute(changed.values(status=row["status"], body=row["body"])).rowcount:
                return False
            last = sa.func.coalesce(sa.func.max(events.c.sequence), -1)
            number = db.scalars(sa.select(last).where(events.c.response == stored.key)).one() + 1
            db.execute(sa.insert(events).values(response=stored.key, sequence=number, data=event(number)))
            return True

        return await self._db.run(end)

    async def append(self, key: str, batch: Sequence[tuple[int, str]], *, finished_here: bool = False) -> bool:
        """Adds numbered events, as JSON, to a background response, without those that are stored already.

        False, and nothing is written, if it was deleted or ended elsewhere. `finished_here`: this server has ended it.
        """

        def write(db: sa.Connection) -> bool:
            mine = responses.c.id == key if finished_here else unfinished(key)
            # First, because it locks the row: no server deletes or ends the response until the events are stored.
            size = responses.c.bytes + sum(len(data) for _, data in batch)
            if not db.execute(sa.update(responses).where(mine).values(beat=now(), bytes=size)).rowcount:
                return False
            rows = [{"response": key, "sequence": number, "data": data} for number, data in batch]
            db.execute(insert(db, events).on_conflict_do_nothing(), rows)
            return True

        return await self._db.run(write)

    async def last(self, key: str) -> tuple[int, str] | None:
        """The last event of a response as number and JSON; None without any."""
        query = sa.select(events).where(events.c.response == key).order_by(events.c.sequence.desc()).limit(1)
        return next(((row.sequence, row.data) for row in await self._db.rows(query)), None)

    async def since(self, key: str, after: int, limit: int = 500) -> list[tuple[int, str]]:
        """Up to `limit` events after number `after`, in order."""
        where = (events.c.response == key) & (events.c.sequence > after)
        query = sa.select(events.c.sequence, events.c.data).where(where).order_by(events.c.sequence).limit(limit)
        return [(row.sequence, row.data) for row in await self._db.rows(query)]


def unfinished(key: str) -> sa.ColumnElement[bool]:
    """The response, while it is unfinished."""
    return (responses.c.id == key) & responses.c.status.in_(UNFINISHED)
