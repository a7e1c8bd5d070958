"""Input items, each stored once: many clients send the whole conversation with every request.

A response's `input` column has the items, or if they are long, numbers of rows in `gptoss_input_items`. A row is
deleted with the last response that uses it (`gptoss_input_uses`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from vllm_gptoss.server.responses.state.database import begin_now, insert
from vllm_gptoss.server.responses.state.stored import Stored
from vllm_gptoss.server.responses.state.tables import input_items, input_uses

INLINE = 1024
"""Characters of JSON up to which the column has the items themselves: one short question is no history."""
MISSING = "input items are missing"
"""Another server has deleted them meanwhile, or the database is damaged."""


def pack(db: sa.Connection, stored: Stored) -> str:
    """The `input` column of a response. Items without an id get the id of their first use."""
    plain = json.dumps(stored.input)
    if len(plain) <= INLINE:
        return plain
    bare = [{name: value for name, value in item.items() if name != "id"} for item in stored.input]
    texts = [json.dumps(item, sort_keys=True) for item in bare]
    hashes = [hashlib.sha256(f"{stored.tenant}\0{text}".encode()).hexdigest() for text in texts]
    begin_now(db, "IMMEDIATE")
    known = _known(db, set(hashes))
    fresh = {
        digest: {"hash": digest, "name": item["id"], "item": text, "bytes": len(text), "tenant": stored.tenant}
        for digest, text, item in zip(reversed(hashes), reversed(texts), reversed(stored.input), strict=True)
        if digest not in known
    }
    if fresh:
        rows = [fresh[digest] for digest in sorted(fresh)]  # one order in all transactions, or they deadlock
        db.execute(insert(db, input_items).on_conflict_do_nothing(index_elements=["hash"]), rows)
        known |= _known(db, set(fresh))
        if not known.keys() >= fresh.keys():
            raise sa.exc.NoResultFound(MISSING)
    uses = [{"response": stored.key, "item": number} for number in sorted({known[digest][0] for digest in hashes})]
    db.execute(sa.insert(input_uses), uses)
    return json.dumps({"items": _named(stored, [known[digest] for digest in hashes])})


def _named(stored: Stored, rows: Sequence[tuple[int, str]]) -> list[list[Any]]:
    """[row's number] of each item, and its id where that is not the row's."""
    entries: list[list[Any]] = []
    taken = {item["id"] for item in stored.input} - stored.nameless
    for item, (number, name) in zip(stored.input, rows, strict=True):
        if item["id"] in stored.nameless and name not in taken:
            item["id"] = name
            taken.add(name)
        entries.append([number] if item["id"] == name else [number, item["id"]])
    return entries


def _known(db: sa.Connection, hashes: set[str]) -> dict[str, tuple[int, str]]:
    c = input_items.c
    found = db.execute(sa.select(c.hash, c.id, c.name).where(c.hash.in_(hashes)))
    return {row.hash: (row.id, row.name) for row in found}


Entry = list[Any] | dict[str, Any]
"""An item, or where it is stored: [row's number, and the item's id where that is not the row's]."""


def entries_of(column: str) -> list[Entry]:
    """The entries of an `input` column, in order."""
    value = json.loads(column)
    return value if isinstance(value, list) else value["items"]


def index_of(db: sa.Connection, entries: Sequence[Entry], identifier: str) -> int | None:
    """Index of the first entry with this item id. Reads no item."""
    c = input_items.c
    unnamed = {entry[0] for entry in entries if isinstance(entry, list) and len(entry) == 1}
    named: set[int] = set()
    if unnamed:
        named = set(db.scalars(sa.select(c.id).where(c.id.in_(unnamed), c.name == identifier)))
    for index, entry in enumerate(entries):
        if isinstance(entry, dict):
            is_it = entry["id"] == identifier
        else:
            is_it = entry[1] == identifier if len(entry) > 1 else entry[0] in named
        if is_it:
            return index
    return None


def load(db: sa.Connection, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The items of these entries."""
    c = input_items.c
    numbers = {entry[0] for entry in entries if isinstance(entry, list)}
    found = db.execute(sa.select(c.id, c.name, c.item).where(c.id.in_(numbers))) if numbers else ()
    rows = {row.id: (row.name, row.item) for row in found}
    if len(rows) < len(numbers):
        raise sa.exc.NoResultFound(MISSING)
    items = []
    for entry in entries:
        if isinstance(entry, list):
            name, text = rows[entry[0]]
            entry = {"id": entry[1] if len(entry) > 1 else name, **json.loads(text)}
        items.append(entry)
    return items


def forget(db: sa.Connection, keys: Sequence[str]) -> None:
    """Removes the items that only these responses use."""
    mine = sa.select(input_uses.c.item).where(input_uses.c.response.in_(keys)).distinct()
    numbers = list(db.scalars(mine))
    db.execute(sa.delete(input_uses).where(input_uses.c.response.in_(keys)))
    for at in range(0, len(numbers), 500):
        part = input_items.c.id.in_(numbers[at : at + 500])
        used = sa.exists().where(input_uses.c.item == input_items.c.id)
        db.execute(sa.delete(input_items).where(part & ~used))
