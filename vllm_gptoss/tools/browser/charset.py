"""Text out of bytes of the web: the charsets that browsers know, by the labels that browsers know, and no others.

Python's own codecs include ones that are no charsets and quadratic ones: `punycode` took 9 s for 480 kB.
"""

from __future__ import annotations

import charset_normalizer  # noqa: F401  bs4's `UnicodeDammit` guesses with it where it is installed
import webencodings
from bs4.dammit import EncodingDetector, UnicodeDammit

_ASCII = bytes(range(128))
_ENOUGH_TO_GUESS = 64
"""Bytes beyond ASCII that suffice to detect an undeclared charset."""

_DECLARED_WITHIN = 4096
"""Bytes in which a document may declare its charset. WHATWG HTML, 13.2.3.2: 1,024."""


def codec(label: str | None) -> str | None:
    """Python's name of the charset that browsers understand by `label`, or None."""
    known = webencodings.lookup(label) if label else None
    if known is None or known.name in ("replacement", "x-user-defined"):
        return None
    return str(known.codec_info.name)


def text_of(body: bytes, declared: str | None) -> str:
    """Text by the declared charset, else UTF-8, else Windows-1252 for short texts, or a guess."""
    inner = EncodingDetector.find_declared_encoding(body[:_DECLARED_WITHIN], is_html=True)
    name = codec(declared) or codec(inner)
    little = not name and len(body.translate(None, _ASCII)) < _ENOUGH_TO_GUESS
    read = UnicodeDammit(
        body,
        [name or "utf-8"],
        user_encodings=["windows-1252"] if little else [],
        exclude_encodings=[inner] if inner and not codec(inner) else [],
    )
    text: str | None = read.unicode_markup
    return text if text is not None else body.decode("utf-8", "replace")
