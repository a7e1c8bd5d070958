"""`python -m tests.support.responses.upgrading URL STEP`: a server of the release after this one, as it starts.

`adds`: its step adds a table, a column and a row. `breaks`: servers of today cannot work with what its step leaves.
`dies`: it is killed in the middle of `adds`.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

import sqlalchemy as sa

from vllm_gptoss.server.responses.state import store
from vllm_gptoss.server.responses.state.database import connect
from vllm_gptoss.server.responses.state.tables import responses
from vllm_gptoss.server.responses.state.upgrade import STEPS, UpgradeStep, add_column, upgrade

later = sa.MetaData()
runs = sa.Table("gptoss_runs", later, sa.Column("id", sa.Integer, primary_key=True), sa.Column("by", sa.Integer))
COLUMN = "colour"
NEXT = STEPS[-1].version + 1


def adds(connection: sa.Connection) -> None:
    later.create_all(connection)
    connection.execute(sa.insert(runs).values(by=os.getpid()))
    table = responses.to_metadata(sa.MetaData())
    column: sa.Column[object] = sa.Column(COLUMN, sa.String(16), nullable=False, server_default="none")
    table.append_column(column)
    add_column(connection, column)


def dies(connection: sa.Connection) -> None:
    adds(connection)
    os.kill(os.getpid(), signal.SIGKILL)


def be_later() -> None:
    """Makes this process a server of the next release: it takes `adds` when it opens its store."""
    store.upgrade = partial(upgrade, steps=(*STEPS, UpgradeStep(NEXT, "adds", adds)))  # type: ignore[assignment]


def main(url: str, kind: str) -> None:
    step = UpgradeStep(NEXT, kind, dies if kind == "dies" else adds, additive=kind != "breaks")
    database = connect(sa.make_url(url))
    with database.begin() as connection:
        upgrade(connection, (*STEPS, step))
    database.dispose()


if __name__ == "__main__":
    main(*sys.argv[1:])
