"""Events of the Harmony parser.

A generated turn is a sequence of messages. Each is announced once (`MessageStarted`), grows (`ContentDelta`) and ends
(`MessageEnded`). The header of a message is final when it is announced: repairs happen before.

Events are a lossless transcript: `raw` of `MessageStarted`, `MessageEnded` and `Repaired` and `text` of `ContentDelta`,
joined in order, are the generated text with its control tokens spelled out (the `{}` that follows an
`EMPTY_ARGUMENTS` repair is the one thing the parser adds).
Format: OpenAI's Harmony response format (developers.openai.com/cookbook, "openai-harmony").
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Channel(StrEnum):
    """Where a message is meant to go; a missing or unknown channel is read as `FINAL`."""

    ANALYSIS = "analysis"
    COMMENTARY = "commentary"
    FINAL = "final"


class EndedBy(StrEnum):
    """What ended a message."""

    END = "end"  # <|end|>
    CALL = "call"  # <|call|>
    RETURN = "return"  # <|return|>
    NEXT = "next"  # the next message began without an end token (a repair)
    CUT = "cut"  # generation stopped inside it: max tokens, stop string, abort. Never execute such a call.


class Repair(StrEnum):
    """One kind of malformed output that was read anyway; counted per kind, logged once per kind."""

    NO_HEADER = "no_header"
    MISSING_START = "missing_start"
    MISSING_MESSAGE = "missing_message"
    MISSING_CHANNEL = "missing_channel"
    UNKNOWN_CHANNEL = "unknown_channel"
    REPEATED_ROLE = "repeated_role"
    DUPLICATE_RECIPIENT = "duplicate_recipient"
    UNKNOWN_RECIPIENT = "unknown_recipient"
    STRAY_WORDS = "stray_words"
    CONTROL_TOKEN_IN_CONTENT = "control_token_in_content"  # noqa: S105
    UNKNOWN_CONTROL_TOKEN = "unknown_control_token"  # noqa: S105
    MISSING_END = "missing_end"
    MISSING_ROLE = "missing_role"
    UNEXPECTED_ROLE = "unexpected_role"
    REPEATED_CHANNEL = "repeated_channel"
    STRAY_END = "stray_end"
    INEXACT_RECIPIENT = "inexact_recipient"
    TRUNCATED_HEADER = "truncated_header"
    TRUNCATED_UTF8 = "truncated_utf8"
    EMPTY_ARGUMENTS = "empty_arguments"


@dataclass(frozen=True, slots=True)
class MessageStarted:
    """A message's header is known.

    `recipient` is set only if that tool was offered in the request; it keeps its full name (`functions.get_weather`,
    `python`, `browser.search`, `my_mcp.lookup`). `content_type` is the constraint word (`json`, `code`) or None.
    `raw` is the header as generated, `<|message|>` included.
    """

    index: int
    channel: Channel
    recipient: str | None
    content_type: str | None
    raw: str = ""


@dataclass(slots=True)  # not frozen: one is made per token, and a frozen one takes four times as long to make
class ContentDelta:
    """Text of message `index`, in whole code points, and the generated tokens it came from.

    They are `tokens` consecutive ones; the first has position `first` in the generation, counted over everything fed.
    A character that began in an earlier token counts with the delta that completes it.
    """

    index: int
    text: str
    tokens: int
    first: int


@dataclass(frozen=True, slots=True)
class MessageEnded:
    """Message `index` is over; `text` is all its deltas joined, `raw` the end token if there was one."""

    index: int
    ended_by: EndedBy
    text: str
    raw: str = ""


@dataclass(frozen=True, slots=True)
class Repaired:
    """The parser repaired invalid output; `raw` is text that belongs to no message."""

    kind: Repair
    detail: str
    raw: str = ""


HarmonyEvent = MessageStarted | ContentDelta | MessageEnded | Repaired
