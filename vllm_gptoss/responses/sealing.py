"""Sealing what a client carries for us: reasoning in stateless use, and compacted history.

AES-256-GCM (NIST SP 800-38D) with a random 96-bit nonce; the tenant and the purpose are authenticated with it, so one
API key cannot open what another was given, nor pass a reasoning item off as a compaction.
"""

from __future__ import annotations

import base64
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PREFIX = "gptoss1."
KEY_BYTES = 32
_NONCE_BYTES = 12


class Sealer:
    """Encrypts and decrypts with one server key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the server key must have {KEY_BYTES} bytes, not {len(key)}")
        self._cipher = AESGCM(key)

    def seal(self, text: str, *, tenant: str, purpose: str) -> str:
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, text.encode(), f"{purpose}:{tenant}".encode())
        return PREFIX + base64.urlsafe_b64encode(nonce + sealed).decode()

    def open(self, sealed: str, *, tenant: str, purpose: str) -> str | None:
        """The text, or None if this server did not seal it for this tenant and purpose, or it was altered."""
        if not sealed.startswith(PREFIX):
            return None
        try:
            raw = base64.urlsafe_b64decode(sealed[len(PREFIX) :])
            opened = self._cipher.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], f"{purpose}:{tenant}".encode())
        except (InvalidTag, ValueError):
            return None
        return opened.decode()


def new_key() -> bytes:
    return AESGCM.generate_key(bit_length=KEY_BYTES * 8)
