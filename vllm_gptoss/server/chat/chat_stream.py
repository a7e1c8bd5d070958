"""Streamed chat completions, with less work per token than vLLM's handler.

vLLM's generator writes the first frame, and all frames from the first tool call or the end on. `Ahead` writes the text
in between, with the same bytes. Meanwhile the generator holds the engine's first result. `Ahead` adds its tokens to the
`ReadTokens` of that result, so the parser does not read them again.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import msgspec

from vllm_gptoss import _vllm
from vllm_gptoss.server.chat.chat import ChatDelta, ChatReader
from vllm_gptoss.server.chat.vllm_constraint import offered_tools
from vllm_gptoss.server.chat.vllm_parser import ReadTokens, chat_reader
from vllm_gptoss.server.streaming.direct_send import Direct, NextText
from vllm_gptoss.server.streaming.fast_frames import Ahead, Frames, TextStream

_encode = msgspec.json.Encoder().encode


class ChatStream(TextStream):
    """Subclass part for vLLM's chat handler."""

    def chat_completion_stream_generator(
        self, request: Any, result_generator: AsyncGenerator[Any, None], request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncIterator[str | bytes]:
        """Overrides vLLM's method: server-sent events of one request."""

        def attach(direct: Direct) -> None:
            if not request.stop:  # stop strings are searched in the results
                direct.attach(self.engine_client, request_id)  # type: ignore[attr-defined]  # vLLM's

        ahead = Ahead(result_generator, attach)
        theirs = super().chat_completion_stream_generator(request, ahead, request_id, *args, **kwargs)  # type: ignore[misc]
        return Frames(theirs, ahead, lambda head: _teller(head, request)) if self._is_plain(request) else theirs


class _Told:
    """Writes the text of a stream (a `Teller`). `reader` has read no tokens yet."""

    def __init__(self, reader: ChatReader, text: _Text) -> None:
        self._reader = reader
        self._text = text
        self._told = ReadTokens(reader)

    def begin(self, choice: Any) -> bytes | None:
        """vLLM's first frame has no text. The first result's tokens become `ReadTokens`, which grow with the stream."""
        tokens, choice.token_ids = choice.token_ids, self._told
        return self._read(tokens)

    def read(self, choice: Any) -> bytes | None:
        return self._read(choice.token_ids)

    def _read(self, token_ids: Sequence[int]) -> bytes | None:
        self._told += token_ids
        delta = self._reader.feed(token_ids)
        if delta.calls:
            self._told.untold = delta
            return None
        return self._text.frame_of(delta)

    def take(self, token_ids: Sequence[int], text: NextText) -> bytes | None:
        # `text` is unused: vLLM does not detokenise these requests.
        if len(token_ids) == 1 and (added := self._reader.next_text(token_ids[0])):
            self._told.append(token_ids[0])
            return self._text.frame(added, self._reader.is_reasoning)
        delta = self._reader.feed_text(token_ids)
        if delta is None:
            return None
        self._told.extend(token_ids)
        return self._text.frame_of(delta)

    def hand_on(self, choice: Any) -> None:
        """Nothing to add: the generator still has the first result."""


def _teller(head: str, request: Any) -> _Told | None:
    if around := _around_delta(head):
        return _Told(
            chat_reader(request, offered_tools(request.tools)), _Text(*around, bool(request.include_reasoning))
        )
    return None


def _around_delta(head: str) -> tuple[bytes, bytes] | None:
    """The bytes before and after the `delta` of a text frame, from the first frame; None for an error."""
    said = json.loads(head.removeprefix("data: "))
    if "choices" not in said:
        return None
    chunk = _vllm.chat_text_chunk(said["id"], said["created"], said["model"], "")
    before, _, after = chunk.partition('{"content":""}')
    return f"data: {before}".encode(), f"{after}\n\n".encode()


class _Text:
    """Encodes frames: `prefix`, the `delta` with the fields of vLLM's `DeltaMessage` in order, `suffix`."""

    def __init__(self, prefix: bytes, suffix: bytes, include_reasoning: bool) -> None:
        self._content = prefix + b'{"content":'
        self._reasoning = prefix + b'{"reasoning":'
        self._after = b"}" + suffix
        self._include_reasoning = include_reasoning

    def frame(self, text: str, is_reasoning: bool) -> bytes:
        """The frame of a piece of content or reasoning."""
        if not is_reasoning:
            return b"%b%b%b" % (self._content, _encode(text), self._after)
        return b"%b%b%b" % (self._reasoning, _encode(text), self._after) if self._include_reasoning else b""

    def frame_of(self, delta: ChatDelta) -> bytes:
        """The frame of a delta; empty without text."""
        if delta.reasoning and delta.content and self._include_reasoning:
            both = b'%b,"reasoning":%b' % (_encode(delta.content), _encode(delta.reasoning))
            return b"%b%b%b" % (self._content, both, self._after)
        if delta.content:
            return self.frame(delta.content, False)
        return self.frame(delta.reasoning, True) if delta.reasoning else b""
