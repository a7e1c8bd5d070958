"""Who sends a request: the tenant that owns what it stores, and the caller whose share of the server it takes."""

from __future__ import annotations

import hashlib

from fastapi import FastAPI
from starlette.requests import HTTPConnection

PUBLIC = "public"
"""The tenant of clients that send no key."""


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
