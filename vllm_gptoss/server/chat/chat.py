"""Splits a generated turn into the reasoning, content and tool calls of chat completions.

Analysis is reasoning; a message to an offered tool is a call; everything else is content. Streamed and whole answers
use the same reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from vllm_gptoss.server.harmony.custom import InputUnwrapper
from vllm_gptoss.server.harmony.events import Channel, ContentDelta, EndedBy, MessageEnded, MessageStarted
from vllm_gptoss.server.harmony.held import NOTHING, Held
from vllm_gptoss.server.harmony.messages import FUNCTIONS
from vllm_gptoss.server.harmony.offered import OfferedTools
from vllm_gptoss.server.harmony.parser import HarmonyParser
from vllm_gptoss.server.harmony.stops import StopFinder
from vllm_gptoss.server.harmony.tokens import CALL, RETURN


@dataclass(slots=True)
class CallDelta:
    """More of call `index`; only the first delta of a call has its `name`."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class ChatDelta:
    """The text and calls that new tokens added."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add_call(self, index: int, name: str | None, arguments: str) -> None:
        if name is None and self.calls and self.calls[-1].index == index:
            self.calls[-1].arguments += arguments
        else:
            self.calls.append(CallDelta(index, name, arguments))


_LAST = (RETURN, CALL)


class _Kind(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class ChatReader:
    """Reads the tokens of one choice of a request.

    stop: stop strings, searched in content only. Text that may be the beginning of one is delayed
    min_tokens: number of tokens before the search for stop strings begins
    counts: whether repairs are counted; a second reader of the same tokens must not count them again
    held: which parts of the turn a grammar constrains
    reads_on: whether tokens after the end of the turn are read, as with `ignore_eos`. Otherwise they are dropped, since
        the model may invent a tool's answer there
    marks: whether `take_answer` is used
    prefix: token ids of the header of the message that the prompt leaves open
    """

    def __init__(
        self,
        tools: OfferedTools,
        stop: Sequence[str] = (),
        *,
        keeps_stop: bool = False,
        min_tokens: int = 0,
        counts: bool = True,
        held: Held = NOTHING,
        reads_on: bool = False,
        marks: bool = False,
        prefix: Sequence[int] = (),
    ) -> None:
        self.reasoning_tokens = 0
        self._answer: list[int] | None = [] if marks else None
        self._unmarked: list[tuple[range, int]] = []  # token positions, number of pending characters
        self._parser = HarmonyParser(tools, prefix, counts=counts, held=held)
        self._reads_on = reads_on
        self._is_over = False
        self._stops = StopFinder(stop, keeps_stop=keeps_stop)
        self._unwatched = min_tokens if any(stop) else 0
        self._kind = _Kind.CONTENT
        self._calls = 0
        self._wrapped = tools.wrapped
        self._input: InputUnwrapper | None = None  # of the open call of a custom tool
        self._spoken = {_Kind.REASONING: False, _Kind.CONTENT: False}
        self._is_first_text = True
        self._is_searched = any(stop)
        self._goes_on = False  # whether the next text token needs no processing
        self._channel = self._last_channel = Channel.FINAL

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.found

    def feed(self, token_ids: Sequence[int]) -> ChatDelta:
        delta = ChatDelta()
        if not self._reads_on:
            token_ids = self._until_end(token_ids)
        if self._unwatched:
            first, token_ids = token_ids[: self._unwatched], token_ids[self._unwatched :]
            self._read(delta, self._parser.feed(first))
            self._unwatched -= len(first)
        return self._read(delta, self._parser.feed(token_ids))

    def take_answer(self) -> list[int]:
        """Positions of the tokens that gave content since the previous call."""
        taken, self._answer = self._answer or [], []
        return taken

    @property
    def is_reasoning(self) -> bool:
        """Whether the open message is reasoning."""
        return self._kind is _Kind.REASONING

    def next_text(self, token: int) -> str | None:
        """As `feed` for one token of text, at a quarter of the cost. None, with nothing read, for any other token."""
        if not self._goes_on or (text := self._parser.next_text(token)) is None:
            return None
        if self._kind is _Kind.REASONING:
            self.reasoning_tokens += 1
        return text

    def feed_text(self, token_ids: Sequence[int]) -> ChatDelta | None:
        """As `feed` for tokens that only add to reasoning or content; else None, and the tokens are not read."""
        if self._is_over or self._unwatched or self._kind is _Kind.CALL:
            return None
        events = self._parser.feed_text(token_ids)
        return None if events is None else self._read(ChatDelta(), events)

    def _until_end(self, token_ids: Sequence[int]) -> Sequence[int]:
        if self._is_over:
            return ()
        for at, token in enumerate(token_ids, 1):
            if token in _LAST:
                self._is_over, self._goes_on = True, False
                return token_ids[:at]
        return token_ids

    def finish(self) -> ChatDelta:
        """Ends the generation. A message without an end token counts as cut; its text is returned."""
        return self._read(ChatDelta(), self._parser.finish(cut=True))

    def _read(self, delta: ChatDelta, events: Sequence[object]) -> ChatDelta:
        for event in events:
            match event:
                case ContentDelta(text=text, tokens=tokens):
                    if self._kind is _Kind.REASONING:
                        self.reasoning_tokens += tokens
                    elif self._answer is not None and self._kind is _Kind.CONTENT:
                        self._unmarked.append((range(event.first, event.first + tokens), len(text)))
                    self._text(delta, text)
                case MessageStarted(channel=channel, recipient=recipient):
                    self._start(delta, channel, recipient)
                case MessageEnded(text=text, ended_by=ended_by):
                    self._emit(delta, self._stops.flush())
                    if self._input:
                        self._emit(delta, self._input.end(text, cut=ended_by is EndedBy.CUT))
                        self._input = None
        return delta

    def _start(self, delta: ChatDelta, channel: Channel, recipient: str | None) -> None:
        self._is_first_text, self._goes_on = True, False
        self._channel = channel
        if recipient is not None:
            self._kind = _Kind.CALL
            delta.add_call(self._calls, recipient.removeprefix(FUNCTIONS + "."), "")
            self._calls += 1
            self._input = InputUnwrapper() if recipient in self._wrapped else None
        else:
            self._kind = _Kind.REASONING if channel is Channel.ANALYSIS else _Kind.CONTENT

    def _text(self, delta: ChatDelta, text: str) -> None:
        if self._input:
            text = self._input.feed(text)
        is_watched = self._kind is _Kind.CONTENT and not self._unwatched
        self._emit(delta, self._stops.feed(text) if is_watched else text)

    def _emit(self, delta: ChatDelta, text: str) -> None:
        if not text:
            return
        if self._kind is _Kind.CALL:
            delta.add_call(self._calls - 1, None, text)
            return
        if self._answer is not None and self._kind is _Kind.CONTENT:
            self._mark(self._answer, len(text))
        is_one_answer = self._kind is _Kind.CONTENT and self._channel is self._last_channel is Channel.FINAL
        if self._is_first_text and self._spoken[self._kind] and not is_one_answer:
            # Reasoning and preambles are separated by a newline; two parts of the final answer are joined.
            text = "\n" + text
        self._is_first_text, self._goes_on = False, not self._is_searched
        if self._kind is _Kind.CONTENT:
            self._last_channel = self._channel
        self._spoken[self._kind] = True
        if self._kind is _Kind.REASONING:
            delta.reasoning += text
        else:
            delta.content += text

    def _mark(self, answer: list[int], characters: int) -> None:
        """Adds the positions of the tokens that make the next `characters` of content; a partial token counts too."""
        while characters > 0 and self._unmarked:
            positions, length = self._unmarked.pop(0)
            answer += positions
            if length > characters:
                self._unmarked.insert(0, (range(0), length - characters))
            characters -= length
