"""Who sends a request: the tenant that owns what it stores, and the caller whose share of the server it takes."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable

from fastapi import FastAPI
from starlette.requests import HTTPConnection

PUBLIC = "public"
"""The tenant of clients that send no key."""


class FullError(Exception):
    """A caller has all the places that it may have (`is_callers`), or all are taken."""

    def __init__(self, places: int, is_callers: bool) -> None:
        super().__init__(f"{places} of this API key's" if is_callers else f"{places} of all API keys'")
        self.is_callers = is_callers


class Places:
    """How many of something each caller may have at once, and all callers together."""

    def __init__(self, per_caller: int, total: int) -> None:
        self._per_caller = per_caller
        self._total = total
        self._taken: Counter[str] = Counter()

    def take(self, caller: str) -> Callable[[], None]:
        """Takes a place; what is returned gives it back. Raises `FullError`."""
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
    """Who owns what this request stores: a hash of the API key, or `public` without one."""
    scheme, _, rest = (authorization or "").strip().partition(" ")
    # RFC 9110, section 11.1: the name of a scheme has no case.
    key = rest.strip() if scheme.lower() == "bearer" else (authorization or "").strip()
    return hashlib.sha256(key.encode()).hexdigest()[:32] if key else PUBLIC


def set_keys_are_checked(app: FastAPI, are_checked: bool) -> None:
    """Tells `app` whether each API key is a caller of its own: only where somebody checks them."""
    app.state.gptoss_keys_are_checked = are_checked


def caller_of(connection: HTTPConnection) -> str:
    """Whose share of queues and memory a request takes: its tenant's; "" where keys are not checked.

    A client could send a new made-up key with each request, and would be as many callers.
    """
    if not getattr(connection.app.state, "gptoss_keys_are_checked", False):
        return ""
    tenant = tenant_of(connection.headers.get("authorization"))
    return "" if tenant == PUBLIC else tenant
