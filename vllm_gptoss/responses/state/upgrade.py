"""Rows of earlier versions as this one finds them."""

from __future__ import annotations

import logging

import sqlalchemy as sa

from vllm_gptoss.responses.state.stored import row_key
from vllm_gptoss.responses.state.tables import events, input_uses, item_index, responses, settings

logger = logging.getLogger(__name__)

DONE = "response_keys"
"""The setting that says that all keys are of today's form."""


def rename_keys(connection: sa.Connection) -> None:
    """Gives responses under ids that clients chose the keys that `row_key` makes; the id alone was the key before.

    Once for a database. A server of the earlier version that still runs on it does not find them any more.
    """
    if connection.scalar(sa.select(settings.c.value).where(settings.c.name == DONE)) is not None:
        return
    rows = connection.execute(sa.select(responses.c.id, responses.c.tenant).where(~responses.c.id.contains("~")))
    renamed = [(row.id, key) for row in rows if (key := row_key(row.tenant, row.id)) != row.id]
    for old, new in renamed:
        connection.execute(sa.update(responses).where(responses.c.id == old).values(id=new))
        for table in (events, item_index, input_uses):
            connection.execute(sa.update(table).where(table.c.response == old).values(response=new))
    connection.execute(sa.insert(settings).values(name=DONE, value="2"))
    if renamed:
        logger.info("Response store: %d responses of an earlier version are found by their ids again", len(renamed))
