"""Access to a tools service: bearer keys, compared in constant time; callers are identified by a hash of the key."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_gptoss.tools.config import ToolConfigError

VARIABLE = "GPTOSS_TOOLS_KEYS"
_CALLER = "vllm_gptoss.caller"
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")
_SHORTEST = 16


@dataclass(frozen=True)
class Keys:
    """SHA-256 of each key. Empty: everybody may."""

    digests: Sequence[bytes] = field(default=(), repr=False)

    def caller(self, authorization: str | None) -> str | None:
        """A short hash that identifies the sender of this header; None for a key that is not here."""
        if not self.digests:
            return ""
        scheme, _, key = (authorization or "").strip().partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        known = False
        for other in self.digests:  # all of them, for constant time
            known |= hmac.compare_digest(digest, other)
        return digest.hex()[:32] if known and scheme.lower() == "bearer" else None


def load_keys(file: Path | None, environ: Mapping[str, str] = os.environ) -> Keys:
    """One key a line, or `sha256:` and the hash of one; `#` begins a comment. `GPTOSS_TOOLS_KEYS` has them by commas.
    Raises ToolConfigError: the file cannot be read, has no key, or one that is too short to be secret."""
    lines = environ.get(VARIABLE, "").split(",")
    if file is not None:
        try:
            lines += file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ToolConfigError(f"--keys-file {file}: {error}") from error
    keys = [key for line in lines if (key := line.partition("#")[0].strip())]
    if file is not None and not keys:
        raise ToolConfigError(f"--keys-file {file}: there is no key in it")
    return Keys([_digest(key) for key in keys])


def _digest(key: str) -> bytes:
    if hashed := _HASHED.fullmatch(key):
        return bytes.fromhex(hashed[1])
    if len(key) < _SHORTEST:
        raise ToolConfigError(f"a key has fewer than {_SHORTEST} characters; `openssl rand -hex 32` makes one")
    return hashlib.sha256(key.encode()).digest()


class Doorkeeper:
    """ASGI middleware: 401 without a key, else the caller's name for `caller_of`. `/health` needs none."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        caller = self._keys.caller(HTTPConnection(scope).headers.get("authorization"))
        if caller is None:
            challenge = {"WWW-Authenticate": "Bearer"}
            refused = JSONResponse({"error": "a key of this service is needed"}, 401, headers=challenge)
            await refused(scope, receive, send)
            return
        await self._app({**scope, **identity(caller)}, receive, send)


def identity(caller: str) -> dict[str, Any]:
    """The part of a request's scope that names its caller. The `mcp` package binds sessions to its `user`."""
    user = AuthenticatedUser(AccessToken(token="", client_id=caller, scopes=[])) if caller else None
    return {_CALLER: caller, "user": user}


def caller_of(connection: HTTPConnection | None) -> str:
    """The caller of a request that passed the key check; empty if the service has no keys."""
    found: Any = connection.scope.get(_CALLER, "") if connection is not None else ""
    return str(found)
