"""The response store as it was before it had a schema version (commit dd90c28), with rows that its servers wrote."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

tables = sa.MetaData()
responses = sa.Table(
    "gptoss_responses",
    tables,
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("created", sa.Float, nullable=False, index=True),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("previous", sa.String(128)),
    sa.Column("root", sa.String(128), nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("input", sa.Text, nullable=False),
    sa.Column("hidden", sa.Text, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("beat", sa.Float),
    sa.Column("cancel", sa.Boolean, nullable=False, default=False),
)
events = sa.Table(
    "gptoss_events",
    tables,
    sa.Column("response", sa.String(128), primary_key=True),
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("data", sa.Text, nullable=False),
)
item_index = sa.Table(
    "gptoss_items",
    tables,
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("response", sa.String(128), primary_key=True, index=True),
)
conversations = sa.Table(
    "gptoss_conversations",
    tables,
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("created", sa.Float, nullable=False, index=True),
    sa.Column("metadata", sa.Text, nullable=False),
    sa.Column("held_by", sa.String(128)),
    sa.Column("held_until", sa.Float),
)
conversation_items = sa.Table(
    "gptoss_conversation_items",
    tables,
    sa.Column("position", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("conversation", sa.String(128), nullable=False, index=True),
    sa.Column("id", sa.String(128), nullable=False, index=True),
    sa.Column("item", sa.Text, nullable=False),
    sa.Column("hidden", sa.Text),
    sa.Column("bytes", sa.BigInteger, nullable=False),
)
settings = sa.Table(
    "gptoss_settings",
    tables,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

FIRST, SECOND = f"resp_{1:048x}", f"resp_{2:048x}"
CONVERSATION = "conv_old"


def fill(connection: sa.Connection, now: float) -> None:
    """A chain of two responses, one under an id of the client's choice, and a conversation of one item."""
    tables.create_all(connection)
    for name, previous in ((FIRST, None), (SECOND, FIRST), ("mine", None)):
        connection.execute(sa.insert(responses).values(row(name, previous, now)))
        connection.execute(sa.insert(item_index).values(id=f"msg_{name}", response=name))
        connection.execute(sa.insert(events).values(response=name, sequence=0, data="{}"))
    labels = json.dumps({"made": "earlier"})
    connection.execute(sa.insert(conversations).values(id=CONVERSATION, tenant="alice", created=now, metadata=labels))
    item = json.dumps({"id": "msg_c", "type": "message"})
    connection.execute(
        sa.insert(conversation_items).values(conversation=CONVERSATION, id="msg_c", item=item, bytes=len(item))
    )
    connection.execute(sa.insert(settings).values(name="secret", value="kept"))


def row(name: str, previous: str | None, now: float) -> dict[str, Any]:
    """A finished response of alice's."""
    body = json.dumps({"id": name, "status": "completed", "output": [{"id": f"msg_{name}", "type": "message"}]})
    own = json.dumps([{"id": f"in_{name}", "type": "message"}])
    size = len(body) + len(own) + 2
    columns = {"id": name, "tenant": "alice", "created": now, "status": "completed", "previous": previous}
    return columns | {"root": FIRST, "body": body, "input": own, "hidden": "{}", "bytes": size, "cancel": False}
