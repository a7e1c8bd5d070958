"""Streamed chat completions, with less work for each token than vLLM's handler does.

vLLM's generator makes the first frame of a stream and all from the first tool call or the end on; the text in between,
which is nearly everything, is told `ahead` of it. Both give the same bytes.

The generator stands still meanwhile, with the engine's first result in its hands: what was told is added to that.
`ReadTokens` says to our parser that those tokens were read.
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
    """What we put over vLLM's chat handler."""

    def chat_completion_stream_generator(
        self, request: Any, result_generator: AsyncGenerator[Any, None], request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncIterator[str | bytes]:
        """vLLM's method of this name: server-sent events of one request."""

        def attach(direct: Direct) -> None:
            if not request.stop:  # stop strings are looked for in the results
                direct.attach(self.engine_client, request_id)  # type: ignore[attr-defined]  # vLLM's

        ahead = Ahead(result_generator, attach)
        theirs = super().chat_completion_stream_generator(request, ahead, request_id, *args, **kwargs)  # type: ignore[misc]
        return Frames(theirs, ahead, lambda head: _teller(head, request)) if self._is_plain(request) else theirs


class _Told:
    """What tells a stream's text: `Teller`. `reader` has read no token of it yet."""

    def __init__(self, reader: ChatReader, text: _Text) -> None:
        self._reader = reader
        self._text = text
        self._told = ReadTokens(reader)

    def begin(self, choice: Any) -> bytes | None:
        """The first frame of vLLM's has no text; `ReadTokens` in the result that it holds grow with what is told."""
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
        del text  # vLLM detokenises nothing of these requests
        if len(token_ids) == 1 and (added := self._reader.next_text(token_ids[0])):
            self._told.append(token_ids[0])
            return self._text.frame(added, self._reader.is_reasoning)
        delta = self._reader.feed_text(token_ids)
        if delta is None:
            return None
        self._told.extend(token_ids)
        return self._text.frame_of(delta)

    def hand_on(self, choice: Any) -> None:
        """Nothing: the generator still holds the first result."""


def _teller(head: str, request: Any) -> _Told | None:
    if around := _around_delta(head):
        return _Told(
            chat_reader(request, offered_tools(request.tools)), _Text(*around, bool(request.include_reasoning))
        )
    return None


def _around_delta(head: str) -> tuple[bytes, bytes] | None:
    """What stands before and after the `delta` in a frame of text, from the stream's first frame; None for an error."""
    said = json.loads(head.removeprefix("data: "))
    if "choices" not in said:
        return None
    chunk = _vllm.chat_text_chunk(said["id"], said["created"], said["model"], "")
    before, _, after = chunk.partition('{"content":""}')
    return f"data: {before}".encode(), f"{after}\n\n".encode()


class _Text:
    """Text as frames. `prefix` and `suffix` stand around the `delta`, the fields of vLLM's `DeltaMessage` in order."""

    def __init__(self, prefix: bytes, suffix: bytes, include_reasoning: bool) -> None:
        self._content = prefix + b'{"content":'
        self._reasoning = prefix + b'{"reasoning":'
        self._after = b"}" + suffix
        self._include_reasoning = include_reasoning

    def frame(self, text: str, is_reasoning: bool) -> bytes:
        """The frame of a part of the content, or of the reasoning."""
        if not is_reasoning:
            return b"%b%b%b" % (self._content, _encode(text), self._after)
        return b"%b%b%b" % (self._reasoning, _encode(text), self._after) if self._include_reasoning else b""

    def frame_of(self, delta: ChatDelta) -> bytes:
        """The frame of what new tokens added, nothing if it has no text."""
        if delta.reasoning and delta.content and self._include_reasoning:
            both = b'%b,"reasoning":%b' % (_encode(delta.content), _encode(delta.reasoning))
            return b"%b%b%b" % (self._content, both, self._after)
        if delta.content:
            return self.frame(delta.content, False)
        return self.frame(delta.reasoning, True) if delta.reasoning else b""
