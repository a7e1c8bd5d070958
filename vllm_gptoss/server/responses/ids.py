"""Identifiers in the style of the OpenAI API: a prefix that names the kind, then random hex."""

from __future__ import annotations

import secrets


def new(prefix: str) -> str:
    """`prefix` + `_` + 192 random bits, e.g. `resp_5f…`."""
    return f"{prefix}_{secrets.token_hex(24)}"


def is_one(value: str) -> bool:
    """Whether `value` can be an id here: 1 to 128 printable characters, as databases keep them."""
    return 0 < len(value) <= 128 and value.isprintable()
