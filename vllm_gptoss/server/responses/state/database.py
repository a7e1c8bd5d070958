"""The database itself: transactions in threads, SQLite's settings and file, tables of another version."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError, NoResultFound, OperationalError, SQLAlchemyError

from vllm_gptoss.server.http.callers import FullError, Places
from vllm_gptoss.server.responses.metrics import STORE_ERRORS, STORE_SECONDS
from vllm_gptoss.server.responses.state.stored import StoreBusyError, StoreError, TakenError
from vllm_gptoss.server.responses.state.tables import metadata
from vllm_gptoss.settings import SettingsError
from vllm_gptoss.tools.protocol import CALLER
from vllm_gptoss.tools.slots import Slots

logger = logging.getLogger(__name__)

AT_ONCE = {True: 1, False: 8}
"""Concurrent transactions; key: is it SQLite, which has one writer. On 2 cores with 32 streams and 100 saves a second,
the p99 gap of a stream was 44 ms with 8 threads and 81 ms with 16, without saves 29 ms."""
ATTEMPTS = 3
"""Of a transaction that fails because of another one."""
CONFLICTS = ("40001", "40P01")
"""PostgreSQL's `serialization_failure` and `deadlock_detected`: the same transaction can succeed afterwards."""
CLOSE_WAIT = 10.0
"""Seconds for the transactions that are not done when the store closes."""

T = TypeVar("T")


class Database:
    """The database at `url`, with `AT_ONCE` transactions in as many threads. Callers (API keys) share them: `Slots`.

    `key_waiting` transactions of one caller, and `max_waiting` of all, may wait or run.
    """

    def __init__(self, url: sa.URL, key_waiting: int = 2_000, max_waiting: int = 8_000) -> None:
        self.engine = connect(url)
        at_once = AT_ONCE[url.get_backend_name() == "sqlite"]
        self._threads = ThreadPoolExecutor(at_once, "gptoss-store")
        # SQLite's thread has a second transaction in its queue, another caller's: with one, it waited for turns of the
        # event loop, and 400 background responses of one caller delayed another by 115 instead of 28 to 75 ms.
        self._slots = Slots(max(2, at_once))
        self._places = Places(key_waiting, max_waiting)
        self._turns: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def run(self, work: Callable[[sa.Connection], T], *, is_read: bool = False) -> T:
        """Calls `work` in a transaction in a thread, again after a conflict with another transaction.

        A write is carried out even if the caller is cancelled, or the store closes meanwhile.

        Raises:
            TakenError: a row of the same id exists.
            StoreBusyError: too many transactions wait.
            StoreError: the database failed.
        """
        with STORE_SECONDS.time():
            try:
                leave = self._places.take(CALLER.get())
            except FullError as error:
                raise StoreBusyError(error) from None
            turn = asyncio.create_task(self._turn(work, is_read or self._closed))
            self._turns.add(turn)
            turn.add_done_callback(self._turns.discard)
            turn.add_done_callback(lambda _: leave())
            try:
                return await asyncio.shield(turn)
            except asyncio.CancelledError:
                turn.add_done_callback(_log_failure)
                raise

    async def rows(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        """The rows of a query."""
        return await self.run(lambda db: db.execute(query).all(), is_read=True)

    async def _turn(self, work: Callable[[sa.Connection], T], ends_with_store: bool) -> T:
        async with self._slots.one(CALLER.get()):
            if self._closed and ends_with_store:
                raise StoreError("The response store failed: it is closed, because the server stops.")
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._transaction, work)

    def _transaction(self, work: Callable[[sa.Connection], T], attempts: int = ATTEMPTS) -> T:
        try:
            with self.engine.begin() as connection:
                return work(connection)
        except (SQLAlchemyError, OSError) as error:
            state = getattr(getattr(error, "orig", None), "sqlstate", None)
            if attempts > 1 and (isinstance(error, (IntegrityError, NoResultFound)) or state in CONFLICTS):
                return self._transaction(work, attempts - 1)
            if isinstance(error, IntegrityError):
                raise TakenError("There is a row of this id already.") from error
            STORE_ERRORS.inc()  # in the thread: its caller may have been cancelled
            why = str(error.orig) if isinstance(error, OperationalError) else str(error).split("\n", 1)[0]
            raise StoreError(f"The response store failed: {error.__class__.__name__}: {why}") from error

    async def aclose(self) -> None:
        """Refuses waiting reads, waits up to `CLOSE_WAIT` for the other transactions, and closes the connections."""
        self._closed = True
        if lost := (await asyncio.wait(self._turns, timeout=CLOSE_WAIT))[1] if self._turns else set():
            logger.error("The response store closes: %d transactions are not done, their writes may be lost", len(lost))
        for turn in lost:
            turn.cancel()
        self._threads.shutdown(wait=False)
        self.engine.dispose()


def _log_failure(turn: asyncio.Task[Any]) -> None:
    """Logs a failure that no caller receives any more."""
    if not turn.cancelled() and (error := turn.exception()):
        logger.error("A transaction of a client that has disconnected failed: %s", error)


PRAGMAS = "journal_mode=WAL", "synchronous=FULL", "busy_timeout=30000", "foreign_keys=ON"
LIBPQ = {
    "connect_timeout": 10,
    "tcp_user_timeout": 60_000,
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 4,
    "prepare_threshold": None,
}
"""Seconds, and for `tcp_user_timeout` ms; libpq's defaults are hours. Poolers mix up prepared statements of clients."""
STATEMENT_TIMEOUT = "SET statement_timeout = '60s'"


def connect(url: sa.URL) -> sa.Engine:
    """The engine of a database. SQLite commits to the disk and waits for other writers."""
    is_sqlite = url.get_backend_name() == "sqlite"
    waits = {"timeout": 30} if is_sqlite else LIBPQ
    pool: dict[str, Any] = {} if is_sqlite else {"pool_pre_ping": True, "pool_size": AT_ONCE[False]}
    db = sa.create_engine(url, connect_args=waits, **pool)

    @sa.event.listens_for(db, "connect")
    def _configure(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        for statement in map("PRAGMA {}".format, PRAGMAS) if is_sqlite else (STATEMENT_TIMEOUT, "COMMIT"):
            cursor.execute(statement)
        cursor.close()

    return db


def begin_now(db: sa.Connection, how: str = "") -> None:
    """Begins SQLite's transaction before a SELECT, which Python's sqlite3 does not: between two of them another server
    could delete a row and give its number to another."""
    if db.dialect.name == "sqlite":
        db.exec_driver_sql(f"BEGIN {how}")


def insert(db: sa.Connection, table: sa.Table) -> Any:
    """The dialect's `INSERT`, which has `on_conflict_do_nothing` and `on_conflict_do_update`."""
    return (sqlite.insert if db.dialect.name == "sqlite" else postgresql.insert)(table)


def check_driver(url: str) -> None:
    """Imports the driver of `url`, which SQLAlchemy imports only when the store opens. Raises ImportError, or
    SettingsError for a database that the store does not support."""
    if (name := sa.make_url(url).get_backend_name()) not in ("sqlite", "postgresql"):
        raise SettingsError(f"the store is in SQLite or PostgreSQL, not in {name}: GPTOSS_STORE=postgresql://…")
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
