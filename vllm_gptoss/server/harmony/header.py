"""Reads a message's header, well formed or not.

Control tokens divide a header into sections of text: the role, the channel after `<|channel|>`, the content type after
`<|constrain|>`. Any of them may contain a recipient (`to=…`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from vllm_gptoss.server.harmony.events import Channel, Repair, Repaired
from vllm_gptoss.server.harmony.messages import Role
from vllm_gptoss.server.harmony.offered import OfferedTools

ROLES = frozenset(Role)
CHANNELS = frozenset(Channel)
CONTENT_TYPES = frozenset({"json", "code", "text"})

MAX_PLAIN_WORDS = 7
"""Role, channel, content type and four stray words; longer text is no header."""
MAX_PLAIN_WORD = 48
MAX_SECTION = 512
"""Bytes; OpenAI allows 64 for a function's name, MCP clients join server and tool names."""
MAX_SECTIONS = 16
"""Control tokens in one header. A model in a loop writes nothing else, and each `<|start|>` reads the header again."""

# A channel's name ends at a capital, digit or punctuation, as in `<|channel|>finalHello`.
_WORD = re.compile(rb"(?<!\S)(?:analysis|commentary|final)(?=[^a-z_\s])|\S+")
_AUTHOR = re.compile(r"[a-z]\w*\.[\w.-]+\Z", re.ASCII)
"""A tool's name instead of a role: the model invented a tool's answer."""


class HeaderPart(Enum):
    ROLE = auto()
    CHANNEL = auto()
    CONSTRAIN = auto()


@dataclass(slots=True)
class Section:
    """`lead` is the control token before it, spelled out ("" if there was none), `text` its UTF-8 bytes.

    `end` is the position in the generation after its last token, `sizes` how many bytes each token gave.
    """

    lead: str
    part: HeaderPart
    text: bytearray = field(default_factory=bytearray)
    sizes: list[int] = field(default_factory=list)
    end: int = 0

    def add(self, data: bytes, position: int) -> None:
        self.text += data
        self.sizes.append(len(data))
        self.end = position + 1

    def sizes_of_last(self, size: int) -> list[int]:
        """Sizes of the tokens that hold its last `size` bytes."""
        tokens, left = 0, size
        while left > 0:
            tokens += 1
            left -= self.sizes[-tokens]
        return self.sizes[len(self.sizes) - tokens :]

    @property
    def raw(self) -> str:
        return self.lead + self.text.decode("utf-8", "replace")

    @property
    def is_overlong(self) -> bool:
        """Whether the text is longer than any header."""
        if len(self.text) < 2 * MAX_PLAIN_WORDS:
            return False
        plain = [word for word in self.text.split() if b"to=" not in word]
        too_long = any(len(word) > MAX_PLAIN_WORD for word in plain)
        return too_long or len(plain) > MAX_PLAIN_WORDS or len(self.text) > MAX_SECTION


@dataclass(slots=True)
class Header:
    """The fields of a header, and `rest`: bytes at its end that are content."""

    channel: Channel
    recipient: str | None
    content_type: str | None
    repairs: list[Repaired]
    is_recognised: bool
    has_fields: bool
    rest: bytes = b""


class Ending(Enum):
    """Why a header ended."""

    MESSAGE = auto()  # `<|message|>`: all of it is header
    CONTROL = auto()  # another control token
    OVERLONG = auto()  # too long for a header
    STOPPED = auto()  # end of generation
    CUT = auto()  # generation was cut, possibly inside a word


def read(sections: Sequence[Section], offered: OfferedTools, ending: Ending, *, role_given: bool) -> Header:
    """Reads `sections`. `role_given`: whether the prompt contains the role.

    Without `<|message|>` the last section is header only up to its first word that cannot be part of one.
    """
    words = _Words(offered, role_given)
    last = sections[-1] if ending is not Ending.MESSAGE else None
    for section in sections:
        for match in _WORD.finditer(bytes(section.text)):
            word = match.group().decode("utf-8", "replace")
            is_last_word = section is last and match.end() == len(section.text)
            if ending is Ending.CUT and is_last_word and words.may_begin(section.part, word):
                words.has_fields = True
            # The word that made a header too long may be half a character, and is no name anyway.
            elif (ending is Ending.OVERLONG and is_last_word) or not words.take(section.part, word):
                if section is last:
                    header = words.header(sections)
                    header.rest = bytes(section.text[match.start() :])
                    return header
                words.stray.append((section.part, word))
    return words.header(sections)


class _Words:
    """Collects what the words of a header mean."""

    def __init__(self, offered: OfferedTools, role_given: bool) -> None:
        self.offered = offered
        self.role_given = role_given
        self.roles: list[str] = []
        self.channels: list[tuple[HeaderPart, Channel]] = []
        self.recipients: list[str] = []
        self.bare: str | None = None
        self.content_type: str | None = None
        self.stray: list[tuple[HeaderPart, str]] = []
        self.has_fields = False
        self._expects_recipient = False

    def take(self, part: HeaderPart, word: str) -> bool:
        """Whether `word` is part of a header."""
        if self._expects_recipient:
            self._expects_recipient = False
            self.recipients.append(word)
            return True
        head, to, recipient = word.partition("to=")
        if to and (not head or head in ROLES or head in CHANNELS):
            if head:
                self.take(part, head)
            if recipient:
                self.recipients.append(recipient)
            self._expects_recipient = not recipient
            return True
        return self._take_plain(part, word)

    def _take_plain(self, part: HeaderPart, word: str) -> bool:
        is_type = word in CONTENT_TYPES and bool(part is HeaderPart.CHANNEL or self.recipients)
        is_author = part is HeaderPart.ROLE and not self.role_given and not self.roles and bool(_AUTHOR.match(word))
        if (part is HeaderPart.ROLE and word in ROLES) or is_author:
            self.roles.append(word)
        elif part is not HeaderPart.CONSTRAIN and word in CHANNELS:
            self.channels.append((part, Channel(word)))
        elif "." in word and self.offered.resolve(word):
            self.bare = word
        elif self.content_type is None and (part is HeaderPart.CONSTRAIN or is_type):
            self.content_type = word
        else:
            return False
        return True

    def may_begin(self, part: HeaderPart, word: str) -> bool:
        """Whether `word` may be the first half of a header's word."""
        names: set[str] = {"to="}
        if part is HeaderPart.ROLE:
            names |= ROLES
        elif not self.channels:
            names |= CHANNELS
        else:
            names |= CONTENT_TYPES
        return any(name.startswith(word) for name in names)

    def header(self, sections: Sequence[Section]) -> Header:
        repairs: list[Repaired] = []
        recipient = self._recipient(repairs)
        channel = self._channel(repairs, recipient)
        self._role(repairs, any(section.lead == "<|start|>" for section in sections))
        if self.stray:
            repairs.append(Repaired(Repair.STRAY_WORDS, " ".join(word for _, word in self.stray)[:80]))
        fields = bool(self.channels or self.recipients or self._expects_recipient or self.bare or self.has_fields)
        return Header(channel, recipient, self.content_type, repairs, fields or bool(self.roles), fields)

    def _role(self, repairs: list[Repaired], has_start: bool) -> None:
        roles = self.roles
        if len(roles) > 1 or (roles and self.role_given):
            repairs.append(Repaired(Repair.REPEATED_ROLE, roles[-1][:80]))
        if roles and roles[-1] != Role.ASSISTANT:
            repairs.append(Repaired(Repair.UNEXPECTED_ROLE, roles[-1][:80]))
        if has_start and not roles and not self.role_given:
            repairs.append(Repaired(Repair.MISSING_ROLE, "read as assistant"))

    def _recipient(self, repairs: list[Repaired]) -> str | None:
        """The last recipient that was offered."""
        names = self.recipients
        if len(names) > 1:
            repairs.append(Repaired(Repair.DUPLICATE_RECIPIENT, names[-1][:80]))
        for name in (*reversed(names), *filter(None, [self.bare])):
            if found := self.offered.resolve(name):
                if found != name or not names:
                    repairs.append(Repaired(Repair.INEXACT_RECIPIENT, f"{name} read as {found}"[:160]))
                return found
        if names:
            repairs.append(Repaired(Repair.UNKNOWN_RECIPIENT, names[-1][:80]))
        return None

    def _channel(self, repairs: list[Repaired], recipient: str | None) -> Channel:
        """The last channel; without one a call goes to commentary, where the format has calls, and text to final."""
        fallback = Channel.COMMENTARY if recipient else Channel.FINAL
        if not self.channels:
            unknown = next((i for i, (part, _) in enumerate(self.stray) if part is HeaderPart.CHANNEL), None)
            if unknown is None:
                repairs.append(Repaired(Repair.MISSING_CHANNEL, f"read as {fallback}"))
            else:
                repairs.append(
                    Repaired(Repair.UNKNOWN_CHANNEL, f"{self.stray.pop(unknown)[1][:80]} read as {fallback}")
                )
            return fallback
        if len(self.channels) > 1:
            repairs.append(Repaired(Repair.REPEATED_CHANNEL, f"read as {self.channels[-1][1]}"))
        part, channel = self.channels[-1]
        if part is HeaderPart.ROLE:
            repairs.append(Repaired(Repair.MISSING_CHANNEL, f"<|channel|> before {channel} is missing"))
        return channel
