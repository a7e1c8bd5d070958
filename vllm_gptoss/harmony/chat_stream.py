"""Streamed chat completions, with less work for each token than vLLM's handler does.

vLLM builds, checks and serialises three models for every token. Here its generator makes the first frame of a stream
and all from the first tool call or the end on; the text in between, which is nearly everything, is put into a frame
whose other fields are encoded once. Both give the same bytes.

The generator stands still meanwhile, with the engine's first result in its hands: what was told is added to that, so
that its counts are right when it goes on. `ReadTokens` says to our parser that those tokens were read.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec

from vllm_gptoss import _vllm
from vllm_gptoss.direct import Direct, Outlet
from vllm_gptoss.harmony.chat import ChatDelta, ChatReader
from vllm_gptoss.harmony.vllm_constraint import offered_tools
from vllm_gptoss.harmony.vllm_parser import ReadTokens, chat_reader

_encode = msgspec.json.Encoder().encode


class ChatStream:
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
        return Frames(theirs, ahead, request) if self._is_plain(request) else theirs

    def _is_plain(self, request: Any) -> bool:
        """Whether nothing but text changes between the frames of text."""
        usage = request.stream_options
        return not (
            request.n not in (None, 1)
            or request.use_beam_search
            or request.echo
            or request.logprobs
            or request.return_token_ids
            or (usage and usage.continuous_usage_stats)
            or self.enable_force_include_usage  # type: ignore[attr-defined]  # vLLM's: usage in every frame
            or (self.enable_log_outputs and self.request_logger)  # type: ignore[attr-defined]  # vLLM's
        )


class Frames:
    """The frames of one stream. Some of its text goes straight to the response that it is the body of, if any."""

    def __init__(self, theirs: AsyncGenerator[str, None], ahead: Ahead, request: Any) -> None:
        self._ahead = ahead
        self._frames = _told(theirs, ahead, request)

    def __aiter__(self) -> Frames:
        return self

    def __anext__(self) -> Awaitable[str | bytes]:
        return self._frames.__anext__()

    async def aclose(self) -> None:
        await self._frames.aclose()

    def go_straight(self, response: Any) -> None:
        """`response` is the Starlette response that sends these frames."""
        theirs = response.stream_response

        async def stream_response(send: Any) -> None:
            del response.stream_response  # a circle would keep a stream that breaks off until it is collected
            self._ahead.outlet = Outlet(send)
            await theirs(send)

        response.stream_response = stream_response


class Ahead:
    """The engine's results, of which vLLM's generator gets those that were not read before it asks.

    `first` is the one that it holds. Text goes to `outlet`, if there is one, where `attach` can make it.
    """

    def __init__(self, results: AsyncGenerator[Any, None], attach: Callable[[Direct], None]) -> None:
        self.first: Any = None
        self.outlet: Outlet | None = None
        self._attach = attach
        self._results = results
        self._next: Any = None

    def __aiter__(self) -> Ahead:
        return self

    async def __anext__(self) -> Any:
        given, self._next = self._next, None
        if isinstance(given, Exception):
            raise given
        result = given or await anext(self._results)
        self.first = self.first or result
        return result

    async def aclose(self) -> None:
        """Ends the request in the engine, unless it has ended."""
        await self._results.aclose()

    async def read(self, reader: ChatReader, text: _Text) -> AsyncGenerator[bytes, None]:
        """The text of the results, up to a call or the end, which is left for the generator, as is a failure."""
        if not _is_text(self.first):
            return
        choice = self.first.outputs[0]
        tokens, choice.token_ids = choice.token_ids, ReadTokens(reader)
        with self._direct(reader, text, choice.token_ids) as direct:
            while True:
                choice.token_ids += tokens
                delta = reader.feed(tokens)
                if delta.calls:
                    choice.token_ids.untold = delta
                    return
                if body := text.frame_of(delta):
                    yield body
                try:
                    result = await (direct.next(self._results) if direct else anext(self._results))
                except StopAsyncIteration:
                    return
                except Exception as error:
                    if direct and error is direct.outlet.error:
                        raise
                    self._next = error
                    return
                if not _is_text(result):
                    self._next = result
                    return
                tokens = result.outputs[0].token_ids

    @contextmanager
    def _direct(self, reader: ChatReader, text: _Text, told: ReadTokens) -> Iterator[Direct | None]:
        """What takes text meanwhile without us, as we would."""

        def take(token_ids: Sequence[int]) -> bytes | None:
            if len(token_ids) == 1 and (added := reader.next_text(token_ids[0])):
                told.append(token_ids[0])
                return text.frame(added, reader.is_reasoning)
            delta = reader.feed_text(token_ids)
            if delta is None:
                return None
            told.extend(token_ids)
            return text.frame_of(delta)

        if self.outlet is None:
            yield None
            return
        direct = Direct(self.outlet, take)
        try:
            self._attach(direct)
            yield direct
        finally:
            direct.close()


def _is_text(result: Any) -> bool:
    return len(result.outputs) == 1 and result.outputs[0].finish_reason is None and not result.finished


async def _told(frames: AsyncGenerator[str, None], ahead: Ahead, request: Any) -> AsyncGenerator[str | bytes, None]:
    async with aclosing(ahead), aclosing(frames):
        head = await anext(frames)
        yield head
        if ahead.first is not None and (around := _around_delta(head)):
            reader = chat_reader(request, offered_tools(request.tools))
            async with aclosing(ahead.read(reader, _Text(*around, request.include_reasoning))) as texts:
                async for text in texts:
                    yield text
        async for rest in frames:
            yield rest


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
