"""A stream's text, from vLLM's output handler to the socket without waking the stream's task.

vLLM makes two objects of each token, puts them into the request's queue and wakes its task, which passes them through
its generators and sends what comes out. Here the handler's own call does it all for text inside a message, which is
nearly every token: the request's state (`_vllm/replaced.py`) hands it to `Direct`, whose bytes `Outlet` sends at once.

All else takes vLLM's way: the end, a failure, a control token, a reader that is too slow. So does text while the task
is busy, and hence the order stays.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextvars import Context, copy_context
from typing import Any

from vllm_gptoss._vllm import replaced

logger = logging.getLogger(__name__)

NextText = Callable[[], str]
"""What vLLM has made of a request's tokens and nobody was told yet; nothing where it does not detokenise."""

Take = Callable[[Sequence[int], NextText], bytes | None]
"""The bytes that new tokens add to a stream, maybe none; None, and nothing read, where they are more than text."""

_NOTHING_ELSE = (None,) * 5
_NO_ERROR = {"error": None}
"""What vLLM's handler says of a step beside its tokens: pooling, end, stop, two transfers, and an error."""


class Outlet:
    """The `send` of one response, for use outside its task.

    send: the ASGI callable, which has sent the head before anything is pushed. Middlewares that look at the body run
        in the context of the task that makes this, as ever.
    """

    def __init__(self, send: Callable[[Any], Any]) -> None:
        self._send = send
        self._context: Context = copy_context()
        self._rest: asyncio.Task[None] | None = None
        self.error: Exception | None = None
        self.last_push = 0.0

    @property
    def is_stalled(self) -> bool:
        """Whether what was pushed last is still on its way."""
        return self._rest is not None and not self._rest.done()

    def push(self, body: bytes) -> bool:
        """Sends a part of the body. False where `settled` must come before the next: the reader is slow, or gone."""
        self.last_push = time.monotonic()
        sending = self._send({"type": "http.response.body", "body": body, "more_body": True})
        try:
            waits_for = self._context.run(sending.send, None)
        except StopIteration:
            return True
        except Exception as error:  # what a middleware raises is for the task, which would have met it
            self.error = error
            return False
        rest = _finish(sending, waits_for)
        self._rest = asyncio.get_running_loop().create_task(rest, context=self._context)
        return False

    async def settled(self) -> None:
        """Returns when all that was pushed is sent. Raises what sending it raised."""
        if self._rest is not None:
            await self._rest
            self._rest = None
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Gives up what is still on its way."""
        if self._rest is not None:
            self._rest.cancel()


class _Begun:
    """A coroutine that was begun outside a task, and waits for `waits_for`."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                yield waits_for
            except BaseException as error:
                step = functools.partial(self._coroutine.throw, error)
            else:
                step = functools.partial(self._coroutine.send, None)
            try:
                waits_for = step()
            except StopIteration:
                return


async def _finish(sending: Coroutine[Any, Any, None], waits_for: Any) -> None:
    await _Begun(sending, waits_for)


class Direct:
    """The text of one request: `take` makes bytes of it, for `outlet`. `attach` before, `close` after its results."""

    def __init__(self, outlet: Outlet, take: Take) -> None:
        self.outlet = outlet
        self._take = take
        self._has_tried = False
        self._detach: Callable[[], None] | None = None
        self._is_waiting = False  # and so all that came before has been sent

    def attach(self, client: Any, request_id: str) -> None:
        """From now on takes the request's text, if vLLM's `client` has it as we know it. Idempotent."""
        if not self._has_tried:
            self._has_tried = True
            try:
                self._detach = replaced.use_request_output(client, request_id, self._wrap)
            except Exception as error:  # a moved vLLM internal
                _say_once(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Leaves the request to vLLM, and gives up what is not sent yet. Idempotent."""
        self.outlet.close()
        self._leave()

    def _leave(self) -> None:
        self._is_waiting = False
        if self._detach is not None:
            self._detach()
            self._detach = None

    async def next(self, results: AsyncGenerator[Any, None]) -> Any:
        """The next result that was not taken. Raises what `results` raises, or what sending the text before it did."""
        self._is_waiting = self._detach is not None
        try:
            result = await anext(results)
        except Exception:
            self._is_waiting = False
            await self.outlet.settled()
            raise
        finally:
            self._is_waiting = False
        await self.outlet.settled()
        return result

    def _wrap(self, theirs: Callable[..., Any], queue: Any, masks: Sequence[Any], text: NextText) -> Callable[..., Any]:
        """For a request's `make_request_output`, which returns None where nothing is left for the queue."""

        def make_request_output(*said: Any, **also: Any) -> Any:
            is_text = said[1:] == _NOTHING_ELSE and also == _NO_ERROR and not masks
            if not is_text or not self._is_waiting or queue.output is not None:
                return theirs(*said, **also)
            try:
                body = self._take(said[0], text)
            except Exception:
                logger.exception("Text of a stream takes vLLM's way, because ours failed")
                self._leave()
                body = None
            if body is None:
                return theirs(*said, **also)
            if body:
                self._is_waiting = self.outlet.push(body)
            return None

        return make_request_output


@functools.cache
def _say_once(why: str) -> None:
    logger.warning("Text of streams takes vLLM's way: %s", why)
