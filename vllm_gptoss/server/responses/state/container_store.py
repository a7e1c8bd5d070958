"""Stored owners of the python tool's containers, so that every server can serve their files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from vllm_gptoss.server.responses.state.clock import now
from vllm_gptoss.server.responses.state.shielding import shield_methods
from vllm_gptoss.server.responses.state.tables import containers


@shield_methods
class ContainerStore:
    """Part of `Store`; `begin` opens a transaction, and raises `StoreError` when the database fails."""

    def __init__(self, begin: Callable[[], AbstractAsyncContextManager[AsyncConnection]]) -> None:
        self._begin = begin

    async def put(self, identifier: str, tenant: str, notebook: str) -> None:
        """Writes the last user of a container, and its conversation of the python tool.

        Raises:
            TakenError: another server writes the same row concurrently.
        """
        row = {"tenant": tenant, "notebook": notebook, "used": now()}
        async with self._begin() as db:
            mine = containers.c.id == identifier
            if not (await db.execute(sa.update(containers).where(mine).values(row))).rowcount:
                await db.execute(sa.insert(containers).values(id=identifier, **row))

    async def get(self, identifier: str) -> tuple[str, str] | None:
        """The tenant and the conversation; None for a container without a recent use."""
        query = sa.select(containers.c.tenant, containers.c.notebook).where(containers.c.id == identifier)
        async with self._begin() as db:
            row = (await db.execute(query)).first()
        return (row.tenant, row.notebook) if row else None


async def forget_old(db: AsyncConnection, seconds: float) -> None:
    """Removes containers that were used longer ago."""
    await db.execute(sa.delete(containers).where(containers.c.used < now() - seconds))
