"""Encryption of data that clients store for the server: reasoning in stateless use, and compacted history.

AES-256-GCM (NIST SP 800-38D) with a random 96-bit nonce; the tenant and the purpose are authenticated with it, so one
API key cannot open what another was given, nor pass a reasoning item off as a compaction.

What is sealed names its key, so that keys can be changed: the ring seals with its first and opens with all of them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vllm_gptoss.server.responses.errors import RetiredKeyError

PREFIX = "gptoss2."
"""Then the key's id, a dot, and base64url of nonce and ciphertext."""
UNNAMED = "gptoss1."
"""As `PREFIX`, without a key's id: the format of releases without a key ring."""
KEY_BYTES = 32
_NONCE_BYTES = 12


class KeyRing:
    """Encrypts with the first of its keys of 32 bytes, and decrypts with all of them."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys or any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"server keys must have {KEY_BYTES} bytes each, not {[len(key) for key in keys]}")
        self._ciphers = {key_id(key): AESGCM(key) for key in keys}
        self._current = key_id(keys[0])

    def seal(self, text: str, *, tenant: str, purpose: str) -> str:
        """`text` encrypted for this tenant and purpose, with the current key."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._ciphers[self._current].encrypt(nonce, text.encode(), f"{purpose}:{tenant}".encode())
        return f"{PREFIX}{self._current}.{base64.urlsafe_b64encode(nonce + sealed).decode()}"

    def open(self, sealed: str, *, tenant: str, purpose: str) -> str | None:
        """The text, or None if this server did not seal it for this tenant and purpose, or it was altered.

        Raises:
            RetiredKeyError: the key that it names is not on the ring.
        """
        context = f"{purpose}:{tenant}".encode()
        if sealed.startswith(UNNAMED):
            opened = (_decrypt(c, sealed[len(UNNAMED) :], context) for c in self._ciphers.values())
            return next((text for text in opened if text is not None), None)
        if not sealed.startswith(PREFIX):
            return None
        name, _, data = sealed[len(PREFIX) :].partition(".")
        if name not in self._ciphers:
            raise RetiredKeyError(f"sealed with the key {name[:16]!r}, which is not on this server's ring")
        return _decrypt(self._ciphers[name], data, context)


def _decrypt(cipher: AESGCM, data: str, context: bytes) -> str | None:
    try:
        raw = base64.urlsafe_b64decode(data)
        return cipher.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], context).decode()
    except (InvalidTag, ValueError):
        return None


def key_id(key: bytes) -> str:
    """A short name of a key, which does not reveal it."""
    return hashlib.sha256(b"gptoss key id" + key).hexdigest()[:12]


def new_key() -> bytes:
    """A random server key of `KEY_BYTES` bytes."""
    return AESGCM.generate_key(bit_length=KEY_BYTES * 8)


def parse_keys(text: str) -> list[bytes]:
    """Keys as base64, separated by commas, the current one first. Raises `ValueError`."""
    try:
        keys = [base64.b64decode(part.strip(), validate=True) for part in text.split(",") if part.strip()]
    except binascii.Error as error:
        raise ValueError(f"a server key is not base64: {error}") from None
    if any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"a server key is base64 of {KEY_BYTES} bytes")
    return keys
