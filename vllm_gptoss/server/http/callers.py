"""Identifies the sender of a request: the tenant that owns stored data, and the caller for fair queueing."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable

from fastapi import FastAPI
from starlette.requests import HTTPConnection

PUBLIC = "public"
"""The tenant of clients without a key."""


class FullError(Exception):
    """No place is free: the caller has its maximum (`is_callers`), or all places are taken."""

    def __init__(self, places: int, is_callers: bool) -> None:
        super().__init__(f"{places} of this API key's" if is_callers else f"{places} of all API keys'")
        self.is_callers = is_callers


class Places:
    """Limits concurrent uses of a resource, per caller and in total."""

    def __init__(self, per_caller: int, total: int) -> None:
        self._per_caller = per_caller
        self._total = total
        self._taken: Counter[str] = Counter()

    def take(self, caller: str) -> Callable[[], None]:
        """Takes a place and returns the function that releases it. Raises `FullError`."""
        if self._taken[caller] >= self._per_caller:
            raise FullError(self._per_caller, True)
        if self._taken.total() >= self._total:
            raise FullError(self._total, False)
        self._taken[caller] += 1
        return functools.partial(self._give_back, caller)

    def _give_back(self, caller: str) -> None:
        self._taken[caller] -= 1
        if not self._taken[caller]:
            del self._taken[caller]


def tenant_of(authorization: str | None) -> str:
    """The owner of data that this request stores: a hash of the API key, or `public` without a key."""
    scheme, _, rest = (authorization or "").strip().partition(" ")
    # RFC 9110, section 11.1: scheme names are case-insensitive.
    key = rest.strip() if scheme.lower() == "bearer" else (authorization or "").strip()
    return hashlib.sha256(key.encode()).hexdigest()[:32] if key else PUBLIC


def set_keys_are_checked(app: FastAPI, are_checked: bool) -> None:
    """Sets whether each API key counts as a separate caller, which is safe only if keys are checked."""
    app.state.gptoss_keys_are_checked = are_checked


def caller_of(connection: HTTPConnection) -> str:
    """The caller for queues and memory limits: the tenant, or "" if keys are not checked.

    Otherwise a client could become many callers by sending invented keys.
    """
    if not getattr(connection.app.state, "gptoss_keys_are_checked", False):
        return ""
    tenant = tenant_of(connection.headers.get("authorization"))
    return "" if tenant == PUBLIC else tenant
