"""Reads one turn: from token chunks to events, messages and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_gptoss.server.harmony import messages as harmony
from vllm_gptoss.server.harmony.events import (
    Channel,
    ContentDelta,
    EndedBy,
    HarmonyEvent,
    MessageEnded,
    MessageStarted,
    Repaired,
)
from vllm_gptoss.server.harmony.held import Held
from vllm_gptoss.server.harmony.messages import Message
from vllm_gptoss.server.harmony.parser import HarmonyParser
from vllm_gptoss.server.harmony.stops import StopFinder
from vllm_gptoss.server.harmony.tokens import CALL, RETURN, token_bytes
from vllm_gptoss.server.responses.prompt.toolset import Kind, Route
from vllm_gptoss.server.responses.run.engine import Chunk, TokenLogprob
from vllm_gptoss.server.responses.run.events import Event, Live, Output
from vllm_gptoss.server.responses.run.item_writers import (
    CustomCallWriter,
    FunctionCallWriter,
    MessageWriter,
    ReasoningWriter,
    SilentWriter,
    Writer,
)
from vllm_gptoss.server.responses.run.job import Job
from vllm_gptoss.server.responses.run.response_object import Usage
from vllm_gptoss.server.responses.run.tool_writers import (
    ApprovalRequestWriter,
    BrowserCallWriter,
    McpCallWriter,
    PythonCallWriter,
)
from vllm_gptoss.tools.protocol import File

UNLIKELY = -9999.0
"""The log-probability of a very unlikely token in OpenAI's API; JSON has no minus infinity."""


@dataclass(slots=True)
class _Open:
    """A message being read. `stops` ends an answer; `held` are the logprobs of text that it holds back."""

    writer: Writer
    channel: Channel
    route: Route | None
    content_type: str | None
    ignored: bool = False
    stops: StopFinder | None = None
    held: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class HeardCall:
    """A complete call, waiting for its turn."""

    route: Route
    writer: Writer
    text: str
    ignored: bool


@dataclass(slots=True)
class Turn:
    """One generation, and its content so far."""

    parser: HarmonyParser
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    calls: list[HeardCall] = field(default_factory=list)
    open: dict[int, _Open] = field(default_factory=dict)
    said: _Open | None = None  # the one of these that was begun last
    finish: str | None = None
    stopped_by: str | int | None = None
    repaired: bool = False


class Listener:
    """Reads all turns of a response in order.

    hidden: by item id, text that later turns need and the API does not show
    files: files of tools that no answer has cited yet
    """

    def __init__(self, job: Job, out: Output) -> None:
        self._job = job
        self._out = out
        self.usage = Usage()
        self.hidden: dict[str, Any] = {}
        self.files: list[File] = []
        self._calls_made = 0
        self._unseen: list[str] = []

    def begin(self, structural_tag: str | None = None) -> Turn:
        """A new turn with a new parser; `structural_tag` is its grammar."""
        is_held = structural_tag is not None and self._job.engine.holds_grammars
        held = Held(calls=is_held, answer=is_held and self._job.answer_is_held)
        return Turn(HarmonyParser(self._job.toolset.offered, held=held))

    def finish(self, turn: Turn) -> list[Event]:
        """The events of the turn's end, also when it was stopped in the middle."""
        stopped_itself = turn.finish == "stop" and turn.stopped_by is None
        return self._read(turn, turn.parser.finish(not stopped_itself))

    def hear(self, turn: Turn, chunk: Chunk) -> list[Event]:
        """The events of newly generated tokens."""
        heard = chunk.token_ids
        if chunk.stopped_by is not None:
            heard = heard[:-1]  # it ends the text and is no part of it
        if chunk.finish is not None:
            turn.finish, turn.stopped_by = chunk.finish, chunk.stopped_by
        if not self._job.ignores_end and (end := _turn_end(chunk.token_ids)) is not None:
            # The engine should have stopped here. Later tokens are dropped: they may be an invented tool result.
            heard = chunk.token_ids[:end]
            turn.finish, turn.stopped_by = "stop", None
        turn.tokens.extend(heard if chunk.stopped_by is None else chunk.token_ids)
        if self.usage.output == 0:
            self.usage.cached = chunk.cached_tokens or 0
        self.usage.output += len(chunk.token_ids)
        if chunk.logprobs:
            turn.logprobs.extend(chunk.logprobs)
        return self._read(turn, turn.parser.feed(heard))

    def tell(self, turn: Turn, live: Live, token_ids: Sequence[int]) -> bytes | None:
        """The bytes for `live` of tokens that only add text to a message; None, with nothing read, for other tokens.

        For one token of an open message, the usual case, this costs a third of `hear`.
        """
        message = turn.said
        deltas = message.writer.text_deltas if message and len(token_ids) == 1 else None
        if message is None or deltas is None or (text := turn.parser.next_text(token_ids[0])) is None:
            events = self._hear_text(turn, token_ids)
            return live.framed(events) if events else b"" if events is not None else None
        turn.tokens.append(token_ids[0])
        self.usage.output += 1
        if message.channel is Channel.ANALYSIS and message.route is None:
            self.usage.reasoning += 1
        if message.writer.adds(text):
            return live.framed_text(deltas, self._out.number(), text)
        events = message.writer.delta(text)
        return live.framed(events) if events else b""

    def _hear_text(self, turn: Turn, token_ids: Sequence[int]) -> list[Event] | None:
        heard = turn.parser.feed_text(token_ids)
        if heard is None:
            return None
        turn.tokens.extend(token_ids)
        self.usage.output += len(token_ids)
        return self._read(turn, heard)

    def _read(self, turn: Turn, heard: Sequence[HarmonyEvent]) -> list[Event]:
        events: list[Event] = []
        for event in heard:
            if isinstance(event, ContentDelta):
                if message := turn.open.get(event.index):
                    events += self._text(turn, message, event)
            elif isinstance(event, MessageStarted):
                if not isinstance(turn.stopped_by, str):  # messages after a stop string are dropped
                    turn.said = turn.open[event.index] = self._open(turn, event)
            elif isinstance(event, MessageEnded):
                turn.said = None
                if event.index in turn.open:
                    events += self._close(turn, turn.open.pop(event.index), event)
            elif isinstance(event, Repaired):
                turn.repaired = True
        return events

    def _text(self, turn: Turn, message: _Open, event: ContentDelta) -> list[Event]:
        if message.channel is Channel.ANALYSIS and message.route is None:
            self.usage.reasoning += event.tokens
        if not event.text:
            return []
        logprobs = self._logprobs(turn, event) if turn.logprobs else []
        text = event.text
        if message.stops and self.usage.output > self._job.limits.min_tokens:
            text = message.stops.feed(text)
            if message.stops.found is not None:
                turn.stopped_by, turn.finish, logprobs = message.stops.found, "stop", []
        if not text:
            message.held += logprobs
            return []
        # The log-probability of a token that is partly held back is held back, too.
        is_partial = message.stops is not None and message.stops.holds
        told, message.held = (message.held, logprobs) if is_partial else (message.held + logprobs, [])
        return message.writer.delta(text, told or None)

    def _logprobs(self, turn: Turn, event: ContentDelta) -> list[dict[str, Any]]:
        limit = self._job.sampling.logprobs or 0
        entries = turn.logprobs[event.first : event.first + event.tokens]
        return [
            {
                **_token_logprob(entry.token, entry.logprob),
                "top_logprobs": [_token_logprob(token, value) for token, value in entry.top[:limit]],
            }
            for entry in entries
        ]

    def _open(self, turn: Turn, event: MessageStarted) -> _Open:
        route = self._job.toolset.routes.get(event.recipient) if event.recipient else None
        message = _Open(SilentWriter(), event.channel, route, event.content_type)
        style = self._job.style
        if route is None:
            if event.channel is not Channel.ANALYSIS:
                message.writer = MessageWriter(self._out, style, event.channel, self.files)
                message.stops = StopFinder(self._job.limits.stops) if self._job.limits.stops else None
            elif style.reasoning or style.summary or style.seal:
                message.writer = ReasoningWriter(self._out, style)
        elif self._is_spent(route) or self._is_second(turn, route):
            message.ignored = True
        else:
            message.writer = self._call_writer(route)
        return message

    def _is_spent(self, route: Route) -> bool:
        limit = self._job.limits.tool_calls
        return not route.waits and limit is not None and self._calls_made >= limit

    def _is_second(self, turn: Turn, route: Route) -> bool:
        """Whether the client has a call to answer already, and wants no other: `parallel_tool_calls: false`."""
        return self._job.limits.one_call and route.waits and any(call.route.waits for call in turn.calls)

    def _call_writer(self, route: Route) -> Writer:
        out, style = self._out, self._job.style
        if route.kind is Kind.FUNCTION:
            return FunctionCallWriter(out, route.name, route.namespace)
        if route.kind is Kind.CUSTOM:
            return CustomCallWriter(out, route.name, route.namespace, raw=route.raw)
        if route.kind is Kind.PYTHON:
            return PythonCallWriter(out, style, route.session.container_id if route.session else "")
        if route.kind is Kind.BROWSER:
            return BrowserCallWriter(out, style, route.name)
        label = route.namespace or ""
        return (
            ApprovalRequestWriter(out, label, route.name)
            if route.needs_approval
            else McpCallWriter(out, label, route.name)
        )

    def _close(self, turn: Turn, message: _Open, event: MessageEnded) -> list[Event]:
        cut = event.ended_by is EndedBy.CUT
        # A stop string or token ends an answer where the client wanted it to; only a call is cut by it.
        half = cut and (message.route is not None or turn.stopped_by is None)
        before = len(self._out.items)
        events: list[Event] = []
        if message.stops and (rest := message.stops.flush()):
            events += message.writer.delta(rest, message.held or None)
        events += message.writer.end(event.text, cut=half)
        turn.messages.append(_as_message(message, event.text))
        if message.route is not None and not cut:
            if message.route.is_ours and not message.ignored:
                self._calls_made += 1
            turn.calls.append(HeardCall(message.route, message.writer, event.text, message.ignored))
        self._remember_unseen(message, event.text, before)
        return events

    def _remember_unseen(self, message: _Open, text: str, before: int) -> None:
        """Stores reasoning without an item as hidden text before the next item, for later turns."""
        if isinstance(message.writer, ReasoningWriter) and not self._job.style.reasoning and text:
            self.hidden[message.writer.item_id] = {"text": text}
        elif isinstance(message.writer, SilentWriter) and message.route is None and text:
            self._unseen.append(text)
        elif self._unseen and self._out.items and message.route is not None and not message.ignored:
            at = min(before, len(self._out.items) - 1)
            entry = self.hidden.setdefault(self._out.items[at]["id"], {})
            entry["before"] = "\n".join(self._unseen)
            self._unseen = []


def _as_message(message: _Open, text: str) -> Message:
    """The generated message, in the trained form."""
    route = message.route
    if route is None:
        made = {Channel.ANALYSIS: harmony.analysis, Channel.COMMENTARY: harmony.preamble}
        return made.get(message.channel, harmony.final)(text)
    if route.kind in (Kind.PYTHON, Kind.BROWSER):
        return harmony.builtin_call(route.recipient, text)
    return harmony.call(route.recipient, text)


def _turn_end(tokens: Sequence[int]) -> int | None:
    """Index after the first token that ends a turn; None without one."""
    for at, token in enumerate(tokens):
        if token in (RETURN, CALL):
            return at + 1
    return None


def _token_logprob(token: int, value: float) -> dict[str, Any]:
    raw = token_bytes(token)
    logprob = value if value > UNLIKELY else UNLIKELY
    return {"token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": logprob}
