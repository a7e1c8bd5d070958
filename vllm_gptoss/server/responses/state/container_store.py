"""Stored owners of the python tool's containers, so that every server can serve their files."""

from __future__ import annotations

import sqlalchemy as sa

from vllm_gptoss.server.responses.state.clock import now
from vllm_gptoss.server.responses.state.database import Database, insert
from vllm_gptoss.server.responses.state.tables import containers


class ContainerStore:
    """Part of `Store`; every method raises `StoreError` when the database fails."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def put(self, identifier: str, tenant: str, notebook: str) -> None:
        """Writes the last user of a container, and its conversation of the python tool."""
        row = {"tenant": tenant, "notebook": notebook, "used": now()}

        def write(db: sa.Connection) -> None:
            new = insert(db, containers).values(id=identifier, **row)
            db.execute(new.on_conflict_do_update(index_elements=["id"], set_=row))

        await self._db.run(write)

    async def get(self, identifier: str) -> tuple[str, str] | None:
        """The tenant and the conversation; None for a container without a recent use."""
        query = sa.select(containers.c.tenant, containers.c.notebook).where(containers.c.id == identifier)
        return next(((row.tenant, row.notebook) for row in await self._db.rows(query)), None)


def forget_old(db: sa.Connection, seconds: float) -> None:
    """Removes containers that were used longer ago."""
    db.execute(sa.delete(containers).where(containers.c.used < now() - seconds))
