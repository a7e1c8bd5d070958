"""A response as it is kept, and how keeping one fails."""

from __future__ import annotations

import hashlib
import json
import re
import time
from dataclasses import dataclass, field
from typing import Any

UNFINISHED = ("queued", "in_progress")


class StoreError(Exception):
    """The database refused: full disk, gone, locked for too long, or the size limit is reached."""

    status, code = 503, "store_failed"


class QuotaError(StoreError):
    """What the API key would store is more than it may."""

    status, code = 507, "storage_quota_exceeded"


class TakenError(StoreError):
    """There is a row of this id already."""


class TooLargeError(StoreError):
    """The response is larger than one may be; it never fits."""


class LostError(StoreError):
    """The response was deleted, or has been ended by another server."""


@dataclass(slots=True)
class Stored:
    """A response as it is kept.

    `body` is the response object; `input` this request's own input items. `hidden` maps an output item's id to what the
    model saw and the API does not show (a tool's text), so that a later turn has the whole history. `root` is the first
    response of the chain, which tool sessions are keyed by. `created` has fractions of a second, unlike the body's
    `created_at`: the oldest must be known among those of one second. `silent`: seconds since its server's last sign of
    life, by the database's clock, when this was read. `nameless`: ids of input items that the client gave without one,
    and nobody knows yet.
    """

    id: str
    tenant: str
    body: dict[str, Any]
    input: list[dict[str, Any]] = field(default_factory=list)
    hidden: dict[str, Any] = field(default_factory=dict)
    previous: str | None = None
    root: str = ""
    created: float = field(default_factory=time.time)
    beat: float | None = None
    cancel: bool = False
    silent: float = 0.0
    nameless: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """What names it in the database, and among what this server runs."""
        return row_key(self.tenant, self.id)

    @property
    def status(self) -> str:
        """The response's status, as the API names it."""
        return str(self.body["status"])

    def items_with_hidden(self) -> list[tuple[dict[str, Any], Any]]:
        """Input and output items in order, each with what is hidden behind it."""
        both: list[tuple[dict[str, Any], Any]] = [(item, None) for item in self.input]
        return both + [(item, self.hidden.get(item["id"])) for item in self.body["output"]]

    def row(self) -> dict[str, Any]:
        """The row of `gptoss_responses`."""
        body, own, hidden = json.dumps(self.body), json.dumps(self.input), json.dumps(self.hidden)
        return {
            "id": self.key,
            "tenant": self.tenant,
            "created": self.created,
            "status": self.status,
            "previous": self.previous,
            "root": self.root or self.id,
            "body": body,
            "input": own,
            "hidden": hidden,
            "bytes": len(body) + len(own) + len(hidden),
            "beat": self.beat,
            "cancel": self.cancel,
        }


_RANDOM = re.compile(r"resp_[0-9a-f]{48}")


def row_key(tenant: str, identifier: str) -> str:
    """A response's primary key. Ids that clients choose are their tenant's own: nobody learns which another uses."""
    if _RANDOM.fullmatch(identifier):
        return identifier
    return f"{identifier[:80]}~{hashlib.sha256(f'{tenant}:{identifier}'.encode()).hexdigest()[:40]}"


def stored_of(row: Any, items: list[dict[str, Any]]) -> Stored:
    """From a row of `gptoss_responses` and the input items that it means."""
    m = row._mapping
    body = json.loads(m["body"])
    return Stored(
        body["id"],
        m["tenant"],
        body,
        items,
        json.loads(m["hidden"]),
        m["previous"],
        m["root"],
        m["created"],
        m["beat"],
        m["cancel"],
        m["silent"],
    )
