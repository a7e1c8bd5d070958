"""A stored response, and the store's errors."""

from __future__ import annotations

import hashlib
import json
import re
import time
from dataclasses import dataclass, field
from typing import Any

from vllm_gptoss.server.http.callers import FullError
from vllm_gptoss.server.responses.request.create import CreateRequest

UNFINISHED = ("queued", "in_progress")


class StoreError(Exception):
    """The database failed: full disk, unreachable, locked for too long, or a size limit is reached."""

    status, code = 503, "store_failed"


class QuotaError(StoreError):
    """The API key's quota is exceeded."""

    status, code = 507, "storage_quota_exceeded"


class StoreBusyError(StoreError):
    """As many transactions of the API key, or of all keys, wait as may wait."""

    def __init__(self, full: FullError) -> None:
        name = "KEY" if full.is_callers else "MAX"
        super().__init__(f"{full} transactions wait for the response store (GPTOSS_RESPONSES_{name}_WAITING).")
        self.status, self.code = (429, "rate_limit_exceeded") if full.is_callers else (503, "server_busy")


class TakenError(StoreError):
    """A row of this id exists already."""


class TooLargeError(StoreError):
    """The response exceeds the size limit of one response."""


class LostError(StoreError):
    """The response was deleted, or ended by another server."""


@dataclass(slots=True)
class Stored:
    """A stored response.

    body: the response object; input: the request's own input items
    hidden: by id of an output item, text that the model saw and the API does not show (a tool's), for later turns
    root: first response of the chain, the key of tool sessions
    created: seconds with fractions, unlike the body's `created_at`, so that evictions have an order within a second
    silent: seconds since the last `beat` of its server, by the database's clock, when it was read
    nameless: generated ids of input items, which no client has seen yet
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
    silent: float = 0.0
    nameless: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """Primary key in the database, and key among this server's running responses."""
        return row_key(self.tenant, self.id)

    @property
    def status(self) -> str:
        """The response's status, as the API names it."""
        return str(self.body["status"])

    def items_with_hidden(self) -> list[tuple[dict[str, Any], Any]]:
        """Input and output items in order, each with its hidden data."""
        both: list[tuple[dict[str, Any], Any]] = [(item, None) for item in self.input]
        return both + [(item, self.hidden.get(item["id"])) for item in self.body["output"]]

    def row(self) -> dict[str, Any]:
        """The row of `gptoss_responses`."""
        body, own, hidden = json.dumps(self.body), json.dumps(self.input), json.dumps(self.hidden)
        same = {name: getattr(self, name) for name in (*_COLUMNS, "status")}
        same |= {"id": self.key, "root": self.root or self.id, "body": body, "input": own, "hidden": hidden}
        return same | {"bytes": len(body) + len(own) + len(hidden)}


_COLUMNS = ("tenant", "created", "previous", "root", "beat")


def stored_request(request: CreateRequest, tenant: str, body: dict[str, Any]) -> Stored:
    """The response `body` to this request, without hidden data."""
    previous, nameless = request.previous_response_id, request.nameless
    return Stored(body["id"], tenant, body, request.items, {}, previous, nameless=nameless)


_RANDOM = re.compile(r"resp_[0-9a-f]{48}")


def row_key(tenant: str, identifier: str) -> str:
    """A response's primary key. Ids that clients choose are hashed with the tenant, so tenants cannot collide."""
    if _RANDOM.fullmatch(identifier):
        return identifier
    return f"{identifier[:80]}~{hashlib.sha256(f'{tenant}:{identifier}'.encode()).hexdigest()[:40]}"


def stored_of(row: Any, items: list[dict[str, Any]]) -> Stored:
    """From a row of `gptoss_responses` and its input items."""
    body, hidden = json.loads(row.body), json.loads(row.hidden)
    kept = {name: getattr(row, name) for name in (*_COLUMNS, "silent")}
    return Stored(body["id"], body=body, input=items, hidden=hidden, **kept)
