"""The tables of the response store, as the last step of `upgrade` leaves them.

A change here is a step there: servers of the version before run on the same database for a while.
"""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

# Quotas count from indexes, because the rows are long.

responses = sa.Table(
    "gptoss_responses",
    metadata,
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
    sa.Index("ix_gptoss_responses_usage", "tenant", "root", "created", "bytes"),
)
events = sa.Table(
    "gptoss_events",
    metadata,
    sa.Column("response", sa.String(128), primary_key=True),
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("data", sa.Text, nullable=False),
)
item_index = sa.Table(
    "gptoss_items",
    metadata,
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("response", sa.String(128), primary_key=True, index=True),
)
input_items = sa.Table(
    "gptoss_input_items",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("hash", sa.String(64), nullable=False, unique=True),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("item", sa.Text, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("tenant", sa.String(64)),  # NULL where a server of schema 2 wrote it: it counts in total only
    sa.Index("ix_gptoss_input_items_usage", "tenant", "bytes"),
)
input_uses = sa.Table(
    "gptoss_input_uses",
    metadata,
    sa.Column("response", sa.String(128), primary_key=True),
    # The key keeps a server from removing an item that another is just about to use once more.
    sa.Column("item", sa.Integer, sa.ForeignKey(input_items.c.id), primary_key=True, index=True),
    sqlite_with_rowid=False,
)
conversations = sa.Table(
    "gptoss_conversations",
    metadata,
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("created", sa.Float, nullable=False, index=True),
    sa.Column("metadata", sa.Text, nullable=False),
    sa.Column("held_by", sa.String(128)),
    sa.Column("held_until", sa.Float),  # when the last response on it ended, where none holds it
    sa.Index("ix_gptoss_conversations_usage", "tenant"),
)
conversation_items = sa.Table(
    "gptoss_conversation_items",
    metadata,
    sa.Column("position", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("conversation", sa.String(128), nullable=False, index=True),
    sa.Column("id", sa.String(128), nullable=False, index=True),
    sa.Column("item", sa.Text, nullable=False),
    sa.Column("hidden", sa.Text),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Index("ix_gptoss_conversation_items_usage", "conversation", "bytes"),
)
containers = sa.Table(
    "gptoss_containers",
    metadata,
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("notebook", sa.String(256), nullable=False),
    sa.Column("used", sa.Float, nullable=False, index=True),
)
settings = sa.Table(
    "gptoss_settings",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
