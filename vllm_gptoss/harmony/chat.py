"""What chat completions makes of a turn: reasoning, content and tool calls, whole or as they come.

Analysis is reasoning; a message to an offered tool is a call; everything else is content. Streaming and not give the
same: this reader is the only way, and what has no stream is read in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from vllm_gptoss.harmony.events import Channel, ContentDelta, EndedBy, MessageEnded, MessageStarted
from vllm_gptoss.harmony.messages import FUNCTIONS
from vllm_gptoss.harmony.offered import OfferedTools
from vllm_gptoss.harmony.parser import HarmonyParser


@dataclass(slots=True)
class CallDelta:
    """More of call `index`; its `name` comes once, first."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class ChatDelta:
    """What new tokens added."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add_call(self, index: int, name: str | None, arguments: str) -> None:
        if name is None and self.calls and self.calls[-1].index == index:
            self.calls[-1].arguments += arguments
        else:
            self.calls.append(CallDelta(index, name, arguments))


class _Kind(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class ChatReader:
    """One choice of one request.

    `stop` are the stop strings that the answer must not contain. The engine finds them in the text of all channels and
    stops there, after tokens that hold them were generated, so they are held back here until they cannot be one.
    """

    def __init__(self, tools: OfferedTools, stop: Sequence[str] = ()) -> None:
        self.reasoning_tokens = 0
        self._parser = HarmonyParser(tools)
        self._stop = tuple(filter(None, stop))
        self._longest = max(map(len, self._stop), default=1)
        self._held = ""
        self._kind = _Kind.CONTENT
        self._calls = 0
        self._spoken = {_Kind.REASONING: False, _Kind.CONTENT: False}
        self._is_first_text = True

    def feed(self, token_ids: Sequence[int]) -> ChatDelta:
        return self._read(self._parser.feed(token_ids))

    def finish(self) -> ChatDelta:
        """The end of generation. A message that no token ended was cut; its text is kept, without a stop string."""
        return self._read(self._parser.finish(cut=True))

    def _read(self, events: Sequence[object]) -> ChatDelta:
        delta = ChatDelta()
        for event in events:
            match event:
                case ContentDelta(text=text, tokens=tokens):
                    if self._kind is _Kind.REASONING:
                        self.reasoning_tokens += tokens
                    self._text(delta, text)
                case MessageStarted(channel=channel, recipient=recipient):
                    self._start(delta, channel, recipient)
                case MessageEnded(ended_by=ended_by):
                    self._end(delta, is_cut=ended_by is EndedBy.CUT)
        return delta

    def _start(self, delta: ChatDelta, channel: Channel, recipient: str | None) -> None:
        self._is_first_text = True
        if recipient is not None:
            self._kind = _Kind.CALL
            delta.add_call(self._calls, recipient.removeprefix(FUNCTIONS + "."), "")
            self._calls += 1
        else:
            self._kind = _Kind.REASONING if channel is Channel.ANALYSIS else _Kind.CONTENT

    def _text(self, delta: ChatDelta, text: str) -> None:
        if not self._stop:
            self._emit(delta, text)
            return
        held = self._held + text
        safe = max(0, len(held) - self._longest + 1)
        if (found := _first(held, self._stop)) is not None:
            safe = min(safe, found)
        self._emit(delta, held[:safe])
        self._held = held[safe:]

    def _end(self, delta: ChatDelta, *, is_cut: bool) -> None:
        held, self._held = self._held, ""
        if is_cut and (found := _first(held, self._stop)) is not None:
            held = held[:found]
        self._emit(delta, held)

    def _emit(self, delta: ChatDelta, text: str) -> None:
        if not text:
            return
        if self._kind is _Kind.CALL:
            delta.add_call(self._calls - 1, None, text)
            return
        if self._is_first_text and self._spoken[self._kind]:
            text = "\n" + text  # a second message of its kind starts a line of its own
        self._is_first_text = False
        self._spoken[self._kind] = True
        if self._kind is _Kind.REASONING:
            delta.reasoning += text
        else:
            delta.content += text


def _first(text: str, wanted: Sequence[str]) -> int | None:
    """Where the first of `wanted` begins in `text`."""
    return min((at for at in map(text.find, wanted) if at >= 0), default=None)
