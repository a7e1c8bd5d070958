"""Upgrades the tables of earlier versions while servers of both versions run on them.

Steps only add tables, rows, and columns with defaults, so an older server continues to work after a step. All missing
steps run in one transaction under a database lock: of several servers that start together one applies them, and a
server that is killed in the middle changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from vllm_gptoss.server.responses.state.database import begin_now
from vllm_gptoss.server.responses.state.stored import StoreError, row_key
from vllm_gptoss.server.responses.state.tables import (
    containers,
    events,
    input_items,
    input_uses,
    item_index,
    metadata,
    responses,
    settings,
)

logger = logging.getLogger(__name__)

VERSION, NEEDED = "schema", "schema_needs"
"""Settings: the last step taken, and the first version of servers that can work with the result."""

RENAMED = "response_keys"
"""Setting of databases without a version: all response keys have the current form."""

LOCK = 0x6770746F7373
"""Number of the advisory lock in PostgreSQL: `gptoss` in ASCII."""

LOCK_WAIT = "10s"
"""How long a step waits for a table in use: later statements of other servers queue behind it."""


@dataclass(frozen=True, slots=True)
class UpgradeStep:
    """To schema `version`. Not `additive`: servers of earlier versions refuse to start afterwards."""

    version: int
    what: str
    take: Callable[[sa.Connection], None]
    additive: bool = True


def _first(connection: sa.Connection) -> None:
    metadata.create_all(connection, tables=[table for table in metadata.sorted_tables if table is not containers])
    rename_keys(connection)


def _usage(connection: sa.Connection) -> None:
    add_column(connection, input_items.c.tenant)
    user = sa.select(responses.c.tenant).join(input_uses, input_uses.c.response == responses.c.id)
    owner = user.where(input_uses.c.item == input_items.c.id).limit(1).scalar_subquery()
    connection.execute(sa.update(input_items).values(tenant=owner).where(input_items.c.tenant.is_(None)))
    for table in metadata.sorted_tables:
        for index in table.indexes:
            if str(index.name).endswith("_usage"):
                index.create(connection, checkfirst=True)


STEPS = (
    UpgradeStep(1, "input items stored once, response keys by tenant", _first, additive=False),
    UpgradeStep(2, "who used a container of the python tool", lambda db: metadata.create_all(db, tables=[containers])),
    UpgradeStep(3, "how much each API key stores", _usage),
)


def upgrade(connection: sa.Connection, steps: Sequence[UpgradeStep] = STEPS) -> None:
    """Takes the missing steps. Needs a separate transaction.

    Raises:
        StoreError: the database has a newer, incompatible schema.
    """
    known = steps[-1].version
    if _version(connection) < known:
        _lock(connection)
        there = _version(connection)  # another server may have taken them meanwhile
        missing = [step for step in steps if step.version > there]
        for step in missing:
            step.take(connection)
        if missing:
            needed = [step.version for step in steps if not step.additive]
            _set(connection, VERSION, known)
            _set(connection, NEEDED, max(needed, default=0))
            named = "; ".join(step.what for step in missing)
            logger.info("Response store: from schema %d to %d (%s)", there, known, named)
    elif (newer := _version(connection)) > known:
        _accept(newer, _number(connection, NEEDED), known)


def _accept(newer: int, needed: int, known: int) -> None:
    if known < needed:
        raise StoreError(
            f"The database has schema {newer}, which servers of schema {known}, such as this one, cannot work with. "
            "Install the version of vllm-gptoss that its other servers have, or a newer one"
        )
    logger.warning(
        "Response store: the database has schema %d, of a newer version; this server knows schema %d and works with it",
        newer,
        known,
    )


def _version(connection: sa.Connection) -> int:
    """0 for a database that is empty or older than versions."""
    return _number(connection, VERSION) if sa.inspect(connection).has_table(settings.name) else 0


def _number(connection: sa.Connection, name: str) -> int:
    return int(connection.scalar(sa.select(settings.c.value).where(settings.c.name == name)) or 0)


def _set(connection: sa.Connection, name: str, value: int) -> None:
    connection.execute(sa.delete(settings).where(settings.c.name == name))
    connection.execute(sa.insert(settings).values(name=name, value=str(value)))


def _lock(connection: sa.Connection) -> None:
    """Blocks upgrades by other servers until the transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL statement_timeout = 0")  # an index of a large table takes minutes
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.literal(LOCK, sa.BigInteger))))
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_WAIT}'")
    begin_now(connection, "IMMEDIATE")


def add_column(connection: sa.Connection, column: sa.Column[object]) -> None:
    """Adds a missing column. It must be nullable or have a server default: older servers do not write it."""
    assert column.nullable or column.server_default is not None, f"older servers do not write {column}"
    there = {known["name"] for known in sa.inspect(connection).get_columns(column.table.name)}
    if column.name not in there:
        ddl = sa.schema.CreateColumn(column).compile(dialect=connection.dialect)
        connection.exec_driver_sql(f"ALTER TABLE {column.table.name} ADD COLUMN {ddl}")


def rename_keys(connection: sa.Connection) -> None:
    """Changes the keys of responses with ids from clients to those of `row_key`; before, the id alone was the key.

    Once for a database. Servers of the earlier version do not find these responses afterwards.
    """
    if connection.scalar(sa.select(settings.c.value).where(settings.c.name == RENAMED)) is not None:
        return
    rows = connection.execute(sa.select(responses.c.id, responses.c.tenant).where(~responses.c.id.contains("~")))
    renamed = [(row.id, key) for row in rows if (key := row_key(row.tenant, row.id)) != row.id]
    for old, new in renamed:
        connection.execute(sa.update(responses).where(responses.c.id == old).values(id=new))
        for table in (events, item_index, input_uses):
            connection.execute(sa.update(table).where(table.c.response == old).values(response=new))
    connection.execute(sa.insert(settings).values(name=RENAMED, value="2"))
    if renamed:
        logger.info("Response store: %d responses of an earlier version are found by their ids again", len(renamed))
