"""The database itself: connections, SQLite's settings and file, tables of another version."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from vllm_gptoss.server.responses.state.stored import StoreError
from vllm_gptoss.server.responses.state.tables import metadata

logger = logging.getLogger(__name__)


CONNECT_TIMEOUT, STATEMENT_TIMEOUT = 10, 60
"""Seconds. asyncpg's defaults are 60 and no limit: a host that vanished would block for ever."""


def connect(url: sa.URL) -> AsyncEngine:
    """The engine of a database. SQLite commits to the disk and waits for other writers."""
    if url.get_backend_name() != "sqlite":
        waits = {"timeout": CONNECT_TIMEOUT, "command_timeout": STATEMENT_TIMEOUT}
        return create_async_engine(url, pool_pre_ping=True, connect_args=waits if "asyncpg" in url.drivername else {})
    db = create_async_engine(url, connect_args={"timeout": 30})

    @sa.event.listens_for(db.sync_engine, "connect")
    def _pragmas(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=30000", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    return db


def check_driver(url: str) -> None:
    """Imports the driver of `url`, which SQLAlchemy imports only when the store opens. Raises ImportError."""
    sa.make_url(url).get_dialect().import_dbapi()


def keep_private(file: Path) -> None:
    """Makes the database's file private to its owner: it has conversations and an encryption key."""
    if file.name == ":memory:" or str(file).startswith("file:"):
        return  # SQLite's names for databases that are no plain file
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
    for part in (file, *(file.with_name(file.name + end) for end in ("-wal", "-shm"))):
        try:
            if stat.S_IMODE(part.stat().st_mode) & 0o077:
                part.chmod(0o600)
                logger.warning("Response store: %s could be read by others; it is its owner's alone now", part)
        except FileNotFoundError:
            continue
        except PermissionError as error:
            logger.warning("Response store: others can read %s, and this user may not change that: %s", part, error)


def check_columns(connection: sa.Connection) -> None:
    """Raises `StoreError` where a table is of another version."""
    there = sa.inspect(connection)
    for table in metadata.sorted_tables:
        columns = {column["name"] for column in there.get_columns(table.name)}
        if missing := sorted(set(table.columns.keys()) - columns):
            raise StoreError(f"Table {table.name} is of another version: it has no column {', '.join(missing)}")


def cause_of(error: Exception) -> str:
    """The database's error message, without the statement."""
    return str(error.orig) if isinstance(error, OperationalError) else str(error).split("\n", 1)[0]
