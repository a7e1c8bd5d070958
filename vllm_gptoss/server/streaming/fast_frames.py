"""Writes the text frames of a stream instead of vLLM's generator, which builds three models per token.

The generator writes the first frame, and all frames from the first result that is not only text. In between it waits,
and a `Teller` writes the frames, with the constant fields encoded once. The tokens are added to the generator's next
result, so that its counts are right.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

from vllm_gptoss.server.streaming.direct_send import Direct, NextText, Outlet


class Teller(Protocol):
    """Writes the frames of a stream's text; empty bytes if there is no text yet."""

    def begin(self, choice: Any) -> bytes | None:
        """The frame of the first result's text that the generator has not written; None as in `read`."""

    def read(self, choice: Any) -> bytes | None:
        """The frame of a result's only choice; None if the generator must continue, which it then can."""

    def take(self, token_ids: Sequence[int], text: NextText) -> bytes | None:
        """The frame of tokens from `Direct`; None, with nothing read, if they are not only text."""

    def hand_on(self, choice: Any) -> None:
        """Adds the written tokens to the choice with which the generator continues."""


class Ahead:
    """The engine's results for vLLM's generator, without those that `read` has consumed.

    first: the result that the generator has
    outlet: where text is sent directly, or None
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
        """Aborts the request in the engine if it still runs."""
        await self._results.aclose()

    async def read(self, teller: Teller) -> AsyncGenerator[bytes, None]:
        """The frames of text up to the first result for the generator: not only text, the end, a failure."""
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
        """Sends text without waking this task."""
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
    """The frames of one stream; `go_straight` may send some of them directly to the socket.

    theirs: vLLM's generator over `ahead`
    teller_of: makes the teller from the first frame; None leaves all frames to vLLM, as after an error
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
            del response.stream_response  # breaks a reference cycle that would delay the release of an aborted stream
            self._ahead.outlet = Outlet(send)
            await theirs(send)

        response.stream_response = stream_response


class TextStream:
    """Subclass part for both of vLLM's handlers with streams of `Frames`."""

    def _is_plain(self, request: Any) -> bool:
        """Whether text frames differ in nothing but the text."""
        usage = request.stream_options
        return not (
            request.n not in (None, 1)
            or request.use_beam_search
            or request.echo
            or (request.logprobs is not None and request.logprobs is not False)  # a number in completions, possibly 0
            or request.return_token_ids
            or (usage and usage.continuous_usage_stats)
            or self.enable_force_include_usage  # type: ignore[attr-defined]  # vLLM's: usage in every frame
            or (getattr(self, "enable_log_outputs", False) and self.request_logger)  # type: ignore[attr-defined]
        )


def go_straight(response: Any) -> Any:
    """Lets the text of a Starlette response with a body of `Frames` go directly to its socket; returns the response."""
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
