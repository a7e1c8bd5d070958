"""Reads generated tokens as Harmony messages: streaming, tolerant, without loss.

Every generated token belongs to exactly one event (see events.py). No generated token raises an exception. Malformed
output is repaired by these rules and reported as a `Repaired` event:

- `<|start|>` and `<|channel|>` begin a new message anywhere, if the text after them can be a header;
- text in place of a header becomes content once it can no longer be a header (see `header.MAX_PLAIN_WORDS`);
- every other control token is removed from content, but in a JSON string that a grammar constrains it is text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from enum import Enum, auto

from vllm_gptoss.server.harmony import metrics
from vllm_gptoss.server.harmony.events import (
    Channel,
    ContentDelta,
    EndedBy,
    HarmonyEvent,
    MessageEnded,
    MessageStarted,
    Repair,
    Repaired,
)
from vllm_gptoss.server.harmony.header import MAX_SECTIONS, Ending, Header, HeaderPart, Section, read
from vllm_gptoss.server.harmony.held import NOTHING, Held, OpenString
from vllm_gptoss.server.harmony.offered import NO_TOOLS, OfferedTools
from vllm_gptoss.server.harmony.tokens import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    ENDOFTEXT,
    FIRST_CONTROL,
    MESSAGE,
    PIECES,
    RETURN,
    START,
    control_name,
)

_ENDS = {END: EndedBy.END, CALL: EndedBy.CALL, RETURN: EndedBy.RETURN, ENDOFTEXT: EndedBy.RETURN}
_STOPS = frozenset({CALL, RETURN, ENDOFTEXT})
_PARTS = {START: HeaderPart.ROLE, CHANNEL: HeaderPart.CHANNEL, CONSTRAIN: HeaderPart.CONSTRAIN}
_LEADS = {"", "<|start|>", "<|channel|>", "<|constrain|>"}
_Decoder = codecs.getincrementaldecoder("utf-8")


class _State(Enum):
    HEADER = auto()
    CONTENT = auto()
    BETWEEN = auto()  # after an end token


class HarmonyParser:
    """One generated turn, from the token after `<|start|>assistant`.

    `prefix`: header tokens at the end of the prompt, such as `<|channel|>final<|message|>`. They are read first, their
    events come with the first `feed`, and positions count from after them. `counts`: whether repairs are counted and
    logged. `held`: the parts of this turn that a grammar constrains.
    """

    def __init__(
        self, tools: OfferedTools = NO_TOOLS, prefix: Sequence[int] = (), *, counts: bool = True, held: Held = NOTHING
    ) -> None:
        self._tools = tools
        self._held = held
        self._counts = counts
        self._events: list[HarmonyEvent] = []
        self._position = -len(prefix)
        self._is_finished = False
        # The open message. One stays open under a header until that proves to be one.
        self._has_message = False
        self._index = -1
        self._recipient: str | None = None
        self._texts: list[str] = []
        self._string: OpenString | None = None  # of a message that a grammar constrains
        self._string_seen = 0  # number of its texts that `_string` has read
        self._waiting = 0  # content tokens not yet in a delta, because their character is unfinished
        self._end = 0  # position after the last content token
        self._decoder = _Decoder("replace")
        self._is_mid_character = False
        # The header being read.
        self._has_start = True
        self._role_given = True
        self._sections = [Section("", HeaderPart.ROLE)]
        self._state = _State.HEADER
        self._read(prefix)

    def feed(self, token_ids: Sequence[int]) -> list[HarmonyEvent]:
        """Events of the next tokens. Feeding them in other portions only changes the size of deltas."""
        if len(token_ids) == 1 and (text := self.next_text(token_ids[0])):
            return [ContentDelta(self._index, text, 1, self._position - 1)]
        self._read(token_ids)
        events, self._events = self._events, []
        return events

    def feed_text(self, token_ids: Sequence[int]) -> Sequence[HarmonyEvent] | None:
        """As `feed` for tokens that only add text to the open message; None, with nothing read, for others."""
        if self._state is not _State.CONTENT or self._events or not token_ids or max(token_ids) >= FIRST_CONTROL:
            return None
        return self.feed(token_ids)

    def finish(self, cut: bool) -> list[HarmonyEvent]:
        """Events of the end. `cut`: the engine stopped generation (max tokens, stop string, abort), not the model."""
        if not self._is_finished:
            self._is_finished = True
            if self._state is _State.HEADER:
                self._give_up_header(Ending.CUT if cut else Ending.STOPPED)
            if self._state is _State.CONTENT:
                stopped = EndedBy.CALL if self._recipient else EndedBy.RETURN
                self._close(EndedBy.CUT if cut else stopped)
        return self.feed(())

    def _read(self, token_ids: Sequence[int]) -> None:
        at, count = 0, len(token_ids)
        while at < count:
            token = token_ids[at]
            if token >= FIRST_CONTROL:
                self._control(token)
            elif self._state is _State.CONTENT:
                stop = at + 1
                while stop < count and token_ids[stop] < FIRST_CONTROL:
                    stop += 1
                self._position += stop - at
                self._content(token_ids[at:stop])
                at = stop
                continue
            else:
                self._header_text(token)
            self._position += 1
            at += 1

    # Content

    def next_text(self, token: int) -> str | None:
        """The text of one token inside the open message, the usual case; None, with nothing read, for other tokens.

        It costs a third of `feed`.
        """
        is_usual = self._state is _State.CONTENT and token < FIRST_CONTROL
        if not is_usual or self._is_mid_character or self._waiting or self._events:
            return None
        text = PIECES[token]
        if not text or type(text) is not str:
            return None
        self._position = self._end = self._position + 1
        self._texts.append(text)
        return text

    def _content(self, token_ids: Sequence[int]) -> None:
        """Reads text tokens of the open message that end at the current position."""
        table = PIECES
        if not self._is_mid_character:
            try:
                self._add("".join([table[token] for token in token_ids]), len(token_ids), self._position)  # type: ignore[misc]
                return
            except TypeError:  # a token that is part of a character is bytes
                pass
        chunks = [_utf8(table[token]) for token in token_ids]
        self._add_bytes(b"".join(chunks), [len(chunk) for chunk in chunks], self._position)

    def _add(self, text: str, tokens: int, end: int, unfinished: int = 0) -> None:
        """Adds `text` of the `tokens` tokens before `end`; the last `unfinished` of them begin the next character."""
        self._end = end
        self._waiting += tokens
        if text:
            done = self._waiting - unfinished
            self._texts.append(text)
            self._events.append(ContentDelta(self._index, text, done, end - self._waiting))
            self._waiting = unfinished

    def _add_bytes(self, data: bytes, sizes: Sequence[int], end: int) -> None:
        """Adds text that may begin or end inside a character; `sizes` are the bytes of its tokens."""
        text = self._decoder.decode(data)
        open_bytes = len(self._decoder.getstate()[0])
        self._is_mid_character = open_bytes > 0
        unfinished = 0
        while open_bytes > 0 and unfinished < len(sizes):
            unfinished += 1
            open_bytes -= sizes[-unfinished]
        self._add(text, len(sizes), end, unfinished)

    def _flush(self) -> None:
        """Ends a run of text: an unfinished character becomes U+FFFD."""
        if self._is_mid_character:
            self._is_mid_character = False
            self._repair(Repair.TRUNCATED_UTF8, "a character was not finished")
            self._add(self._decoder.decode(b"", True), 0, self._end)
        elif self._waiting:  # ids outside the vocabulary have no text, but they count
            self._events.append(ContentDelta(self._index, "", self._waiting, self._end - self._waiting))
            self._waiting = 0

    # Messages

    def _open(self, header: Header, raw: str) -> None:
        if self._has_message:
            self._close_unended(EndedBy.NEXT)
        if not self._has_start:
            self._repair(Repair.MISSING_START, "read as the assistant's next message")
        for section in self._sections:
            if section.lead not in _LEADS:
                self._repair(Repair.UNKNOWN_CONTROL_TOKEN, f"{section.lead} in a header")
        for repaired in header.repairs:
            self._emit(repaired)
        self._index += 1
        self._recipient = header.recipient
        self._texts = []
        self._string = OpenString() if self._is_held(header) else None
        self._string_seen = 0
        self._has_message = True
        self._state = _State.CONTENT
        self._events.append(MessageStarted(self._index, header.channel, header.recipient, header.content_type, raw))

    def _is_held(self, header: Header) -> bool:
        if header.recipient is None:
            return self._held.answer and header.channel is Channel.FINAL
        return self._held.calls and self._tools.takes_json(header.recipient)

    def _close(self, ended_by: EndedBy, raw: str = "") -> None:
        self._flush()
        text = "".join(self._texts)
        takes_json = self._recipient is not None and self._tools.takes_json(self._recipient)
        if takes_json and ended_by is not EndedBy.CUT and not text.strip():
            self._repair(Repair.EMPTY_ARGUMENTS, f"{self._recipient} is called with {{}}")
            self._events.append(ContentDelta(self._index, "{}", 0, self._position))
            text += "{}"
        self._events.append(MessageEnded(self._index, ended_by, text, raw))
        self._has_message = False
        self._state = _State.BETWEEN

    def _close_unended(self, ended_by: EndedBy) -> None:
        self._repair(Repair.MISSING_END, "the next message began")
        self._close(ended_by)

    # Control tokens

    def _control(self, token: int) -> None:
        if token not in _STOPS and self._is_in_held_string() and (name := control_name(token)):
            self._add_bytes(name.encode(), [len(name)], self._position + 1)
        elif token in _ENDS:
            self._end_token(token)
        elif self._state is _State.HEADER:
            self._control_in_header(token)
        elif self._state is _State.CONTENT:
            self._control_in_content(token)
        elif token == START:
            self._begin_header(Section("<|start|>", HeaderPart.ROLE), has_start=True)
        elif token in (CHANNEL, MESSAGE, CONSTRAIN):
            self._begin_header(Section("", HeaderPart.ROLE), has_start=False)
            self._control_in_header(token)
        else:
            self._repair(Repair.UNKNOWN_CONTROL_TOKEN, "between messages", control_name(token))

    def _is_in_held_string(self) -> bool:
        if self._string is None or self._state is not _State.CONTENT:
            return False
        new, self._string_seen = self._texts[self._string_seen :], len(self._texts)
        return self._string.after("".join(new))

    def _end_token(self, token: int) -> None:
        if self._state is _State.HEADER:
            self._give_up_header(Ending.STOPPED)
        if self._state is _State.CONTENT:
            self._close(_ENDS[token], control_name(token))
        else:
            self._repair(Repair.STRAY_END, "no message to end", control_name(token))

    def _control_in_content(self, token: int) -> None:
        self._flush()
        if token == START:
            self._begin_header(Section("<|start|>", HeaderPart.ROLE), has_start=True)
        elif token == CHANNEL:
            self._begin_header(Section("<|channel|>", HeaderPart.CHANNEL), has_start=False)
        else:
            known = token in (MESSAGE, CONSTRAIN)
            kind = Repair.CONTROL_TOKEN_IN_CONTENT if known else Repair.UNKNOWN_CONTROL_TOKEN
            name = control_name(token)
            self._repair(kind, f"{name or token} taken out", name)

    # Headers

    def _begin_header(self, section: Section, *, has_start: bool) -> None:
        self._state = _State.HEADER
        self._has_start = has_start
        self._role_given = False
        self._sections = [section]

    def _header_text(self, token: int) -> None:
        if self._state is _State.BETWEEN:
            self._begin_header(Section("", HeaderPart.ROLE), has_start=False)
        section = self._sections[-1]
        section.add(_utf8(PIECES[token]), self._position)
        if section.is_overlong:
            self._give_up_header(Ending.OVERLONG)

    def _control_in_header(self, token: int) -> None:
        if token == MESSAGE:
            header = self._read_header(Ending.MESSAGE)
            self._open(header, self._raw() + "<|message|>")
        elif len(self._sections) == MAX_SECTIONS:
            self._give_up_header(Ending.CONTROL)
            self._control(token)
        elif token == START:
            self._restart_header()
        else:
            part = _PARTS.get(token, self._sections[-1].part)
            self._sections.append(Section(control_name(token), part))

    def _restart_header(self) -> None:
        """A second `<|start|>` in a header: only a repeated role continues it; other fields end the first header."""
        header = self._read_header(Ending.CONTROL)
        if header.rest.strip() or header.has_fields:
            self._give_up_header(Ending.CONTROL)
            self._control(START)
        else:
            self._sections.append(Section("<|start|>", HeaderPart.ROLE))
            self._has_start = True

    def _read_header(self, ending: Ending) -> Header:
        return read(self._sections, self._tools, ending, role_given=self._role_given)

    def _give_up_header(self, ending: Ending) -> None:
        """Ends a header without `<|message|>`: the words that can be part of it are header, the rest is content.

        The state is CONTENT afterwards if a message is open, else BETWEEN.
        """
        header = self._read_header(ending)
        if self._has_message and not header.is_recognised:
            self._resume()
        elif header.rest.strip() or (header.recipient and ending is Ending.STOPPED):
            if header.is_recognised:
                header.repairs.append(Repaired(Repair.MISSING_MESSAGE, "the text is read as content"))
            else:
                header.repairs = [Repaired(Repair.NO_HEADER, "the text is read as the final answer")]
            last = self._sections[-1]
            self._open(header, self._raw(len(header.rest)))
            self._add_bytes(header.rest, last.sizes_of_last(len(header.rest)), last.end)
        else:
            if self._has_message:
                self._close_unended(EndedBy.CUT if ending is Ending.CUT else EndedBy.NEXT)
            if raw := self._raw():
                kind = Repair.TRUNCATED_HEADER if raw.strip() else Repair.STRAY_WORDS
                self._repair(kind, "a header without a message", raw)
            self._state = _State.BETWEEN

    def _resume(self) -> None:
        """Text after the message is not a header; appends it to the content."""
        self._state = _State.CONTENT
        for section in self._sections:
            self._flush()
            self._repair(Repair.CONTROL_TOKEN_IN_CONTENT, f"{section.lead} taken out", section.lead)
            self._add_bytes(bytes(section.text), section.sizes, section.end or self._end)

    def _raw(self, without_last: int = 0) -> str:
        """The header as generated, without the last bytes of its last section."""
        *before, last = self._sections
        text = last.text[: len(last.text) - without_last].decode("utf-8", "replace")
        return "".join([*(section.raw for section in before), last.lead, text])

    # Repairs

    def _repair(self, kind: Repair, detail: str, raw: str = "") -> None:
        self._emit(Repaired(kind, detail, raw))

    def _emit(self, repaired: Repaired) -> None:
        if self._counts:
            metrics.record(repaired)
        self._events.append(repaired)


def _utf8(piece: str | bytes) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece
