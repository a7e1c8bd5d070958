"""Text of a stream ahead of vLLM's generator of frames, which makes three models for every token.

The generator makes the first frame, and all from what is more than text on. It stands still in between, while a
`Teller` makes frames of the text, whose other fields are encoded once. What was told is handed to the generator with
what it goes on with, so that its counts are right.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

from vllm_gptoss.server.streaming.direct_send import Direct, NextText, Outlet


class Teller(Protocol):
    """Makes frames of a stream's text: empty bytes where there is nothing to tell yet."""

    def begin(self, choice: Any) -> bytes | None:
        """The frame of what the generator was given first and has not told; None as `read`."""

    def read(self, choice: Any) -> bytes | None:
        """The frame of a result's only choice; None where the generator is to go on, and has all it needs for it."""

    def take(self, token_ids: Sequence[int], text: NextText) -> bytes | None:
        """The frame of tokens that came straight; None, and nothing read, where they are more than text."""

    def hand_on(self, choice: Any) -> None:
        """Adds what the generator has to know to the choice that it goes on with."""


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

    async def read(self, teller: Teller) -> AsyncGenerator[bytes, None]:
        """The frames of text, up to what is left for the generator: more than text, the end, a failure."""
        if not _is_text(self.first):
            return
        with self._direct(teller) as direct:
            frame = teller.begin(self.first.outputs[0])
            while frame is not None:
                if frame:
                    yield frame
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
                    for choice in result.outputs:
                        teller.hand_on(choice)
                    self._next = result
                    return
                frame = teller.read(result.outputs[0])

    @contextmanager
    def _direct(self, teller: Teller) -> Iterator[Direct | None]:
        """What takes text meanwhile without us, as we would."""
        if self.outlet is None:
            yield None
            return
        direct = Direct(self.outlet, teller.take)
        try:
            self._attach(direct)
            yield direct
        finally:
            direct.close()


def _is_text(result: Any) -> bool:
    return len(result.outputs) == 1 and result.outputs[0].finish_reason is None and not result.finished


class Frames:
    """The frames of one stream. Some of its text goes straight to the response that it is the body of, if any.

    theirs: vLLM's generator over `ahead`. teller_of: makes the teller of its first frame; None where the rest is
        vLLM's, as behind an error.
    """

    def __init__(
        self, theirs: AsyncGenerator[str, None], ahead: Ahead, teller_of: Callable[[str], Teller | None]
    ) -> None:
        self._ahead = ahead
        self._frames = _told(theirs, ahead, teller_of)

    def __aiter__(self) -> Frames:
        return self

    def __anext__(self) -> Awaitable[str | bytes]:
        return self._frames.__anext__()

    async def aclose(self) -> None:
        await self._frames.aclose()

    def _go_straight(self, response: Any) -> None:
        theirs = response.stream_response

        async def stream_response(send: Any) -> None:
            del response.stream_response  # a circle would keep a stream that breaks off until it is collected
            self._ahead.outlet = Outlet(send)
            await theirs(send)

        response.stream_response = stream_response


class TextStream:
    """What we put over either of vLLM's handlers whose streams are told ahead."""

    def _is_plain(self, request: Any) -> bool:
        """Whether nothing but text changes between the frames of text."""
        usage = request.stream_options
        return not (
            request.n not in (None, 1)
            or request.use_beam_search
            or request.echo
            or (request.logprobs is not None and request.logprobs is not False)  # a number in completions, maybe 0
            or request.return_token_ids
            or (usage and usage.continuous_usage_stats)
            or self.enable_force_include_usage  # type: ignore[attr-defined]  # vLLM's: usage in every frame
            or (getattr(self, "enable_log_outputs", False) and self.request_logger)  # type: ignore[attr-defined]
        )


def go_straight(response: Any) -> Any:
    """The same Starlette response; where `Frames` are its body, their text goes straight to its socket."""
    if isinstance(frames := getattr(response, "body_iterator", None), Frames):
        frames._go_straight(response)
    return response


async def _told(
    frames: AsyncGenerator[str, None], ahead: Ahead, teller_of: Callable[[str], Teller | None]
) -> AsyncGenerator[str | bytes, None]:
    async with aclosing(ahead), aclosing(frames):
        head = await anext(frames)
        yield head
        if ahead.first is not None and (teller := teller_of(head)):
            async with aclosing(ahead.read(teller)) as texts:
                async for text in texts:
                    yield text
        async for rest in frames:
            yield rest
