"""o200k_harmony: the ids of Harmony's control tokens, and text to ids and ids to bytes.

Ids: "Harmony response format", section Special Tokens, and o200k_harmony's table in openai/harmony.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

from openai_harmony import HarmonyEncodingName, load_harmony_encoding

ENDOFTEXT = 199999
RETURN = 200002
CONSTRAIN = 200003
CHANNEL = 200005
START = 200006
END = 200007
MESSAGE = 200008
CALL = 200012

FIRST_CONTROL = 199998
"""Every id from here up to the vocabulary's end is a control token; every id below it is text."""
VOCABULARY = 201_088
LONGEST = 128
"""Characters of the longest token, a run of blanks."""

STRETCH = 1024
"""Characters per call of the tokenizer. It holds the interpreter's lock, and its time is quadratic in a run of letters:
64,000 times "é" took 4 s; a stretch takes 1.4 ms at worst."""
_PARTED = re.compile(
    r"(?<=[^\W_])(?=[\x00-&(-/:-@\[-`{-\x7f\u2010-\u2027\u3000-\u3020\uff01-\uff0f\uff1a-\uff20])"
    r"|(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])"
)
"""Positions where o200k's pattern always splits: after a word or number, before a character that is in neither. An
apostrophe (`'s`) and a combining mark may be part of a word."""


WORK_S, REST_S = 1e-3, 0.5e-3
"""Seconds of work and of sleep, in turn, of a thread that called `take_turns`.

Without sleep the thread gets the interpreter's lock back at once, and the event loop waits 5 ms
(`sys.getswitchinterval`) after every write to a socket: prompts of 64,000 "é" paused 32 streams for 100 to 180 ms.
"""


class TooManyTokensError(ValueError):
    """A text has more tokens than the caller allows."""


class UnwantedError(Exception):
    """The request for the tokens was cancelled."""


class _Turns(threading.local):
    """Per thread: the end of its last sleep (None without turns), and the event that cancels its work."""

    began: float | None = None
    unwanted: threading.Event


_TURNS = _Turns()


def take_turns(unwanted: threading.Event) -> None:
    """Makes `encode` sleep regularly in this thread, and stop when `unwanted` is set."""
    _TURNS.began, _TURNS.unwanted = time.monotonic(), unwanted


@cache
def encoding() -> Any:
    """The tokenizer; 0.25 s the first time, no network (oss-harmony carries the vocabulary)."""
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def encode(text: str, most: int | None = None) -> list[int]:
    """Ids of plain text. A spelled control token becomes ids of ordinary characters.

    The ids equal the tokenizer's, except in runs of over `STRETCH` letters, signs or blanks, which are split.

    Raises:
        TooManyTokensError: a text of over `STRETCH` characters has more than `most`; the rest of it is not read.
        UnwantedError: as `take_turns`.
    """
    if len(text) <= STRETCH:
        return _encoded(text)
    ids: list[int] = []
    for part in _parts(text):
        ids += _encoded(part)
        if most is not None and len(ids) > most:
            raise TooManyTokensError
        if _TURNS.began is not None and time.monotonic() - _TURNS.began > WORK_S:
            if _TURNS.unwanted.is_set():
                raise UnwantedError
            time.sleep(REST_S)
            _TURNS.began = time.monotonic()
    return ids


def _parts(text: str) -> Iterator[str]:
    at = 0
    while len(text) - at > STRETCH:
        cut = at + STRETCH
        for parted in _PARTED.finditer(text, at + 1, at + STRETCH):
            cut = parted.start()
        yield text[at:cut]
        at = cut
    yield text[at:]


def _encoded(text: str) -> list[int]:
    try:
        ids: list[int] = encoding().encode(text, disallowed_special=())
    except UnicodeEncodeError:  # JSON may carry lone surrogates
        ids = encoding().encode(
            text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), disallowed_special=()
        )
    return ids


@cache
def control_names() -> dict[int, str]:
    """Control token id to its spelling, `<|start|>` and so on."""
    names: dict[int, str] = {}
    for name in encoding().special_tokens_set:
        (token,) = encoding().encode(name, allowed_special={name}, disallowed_special=())
        names[token] = name
    return names


def control_name(token: int) -> str:
    """The spelling of a control token; "" for an id beyond the vocabulary."""
    return control_names().get(token, "")


class _Pieces(dict[int, "str | bytes"]):
    """Text token to its text: str, or bytes if it is part of a character. Filled on demand."""

    def __missing__(self, token: int) -> str | bytes:
        data = token_bytes(token)
        try:
            piece: str | bytes = data.decode()
        except UnicodeDecodeError:
            piece = data
        self[token] = piece
        return piece


PIECES: dict[int, str | bytes] = _Pieces()


def token_bytes(token: int) -> bytes:
    """UTF-8 bytes of a text token, possibly part of a character; b"" for an id outside the vocabulary.

    vLLM pads the logits beyond the vocabulary, so such an id is a model error and not a reason to raise.
    """
    if FIRST_CONTROL <= token < VOCABULARY:
        return control_name(token).encode()
    try:
        return bytes(encoding()._inner.decode_bytes([token]))
    except Exception:  # the library raises its own error type for unknown ids, and OverflowError for negative ones
        return b""
