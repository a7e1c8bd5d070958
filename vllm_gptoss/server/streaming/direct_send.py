"""Sends streamed text from vLLM's output handler to the socket without waking the stream's task.

vLLM makes two objects of each token, puts them into the request's queue and wakes the task, which passes them through
generators and sends the result. For text inside a message, the output handler's call does all of this instead: the
request's state (`_vllm/replaced.py`) passes tokens to `Direct`, and `Outlet` sends the bytes.

vLLM's path handles the end, failures, control tokens, slow readers, and text while the task is busy, so the order of
the text does not change.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextvars import Context, copy_context
from typing import Any

from vllm_gptoss._vllm import replaced

logger = logging.getLogger(__name__)

NextText = Callable[[], str]
"""Returns the text that vLLM has detokenised and not returned yet; empty without detokenisation."""

Take = Callable[[Sequence[int], NextText], bytes | None]
"""Returns the bytes for new tokens, possibly empty; None, with nothing read, if they are not only text."""

_NOTHING_ELSE = (None,) * 5
_NO_ERROR = {"error": None}
"""Arguments of `make_request_output` besides tokens: pooling, end, stop, two transfers, and an error."""


class Outlet:
    """The `send` of one response, for use outside its task.

    send: the ASGI callable, after it has sent the head. Middlewares that read the body run in the context of the task
        that creates the outlet.
    """

    def __init__(self, send: Callable[[Any], Any]) -> None:
        self._send = send
        self._context: Context = copy_context()
        self._rest: asyncio.Task[None] | None = None
        self.error: Exception | None = None
        self.last_push = 0.0

    @property
    def is_stalled(self) -> bool:
        """Whether the last push is not sent yet."""
        return self._rest is not None and not self._rest.done()

    def push(self, body: bytes) -> bool:
        """Sends a part of the body. False if the reader is slow or gone: `settled` must be awaited before the next."""
        self.last_push = time.monotonic()
        sending = self._send({"type": "http.response.body", "body": body, "more_body": True})
        try:
            waits_for = self._context.run(sending.send, None)
        except StopIteration:
            return True
        except Exception as error:  # the task raises exceptions of middlewares
            self.error = error
            return False
        rest = _finish(sending, waits_for)
        self._rest = asyncio.get_running_loop().create_task(rest, context=self._context)
        return False

    async def settled(self) -> None:
        """Waits until everything pushed is sent. Raises the exception of sending."""
        if self._rest is not None:
            await self._rest
            self._rest = None
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Cancels a push that is not sent yet."""
        if self._rest is not None:
            self._rest.cancel()


@types.coroutine
def _rest_of(begun: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """The rest of a coroutine that was started outside a task and waits for `waits_for`."""
    while True:
        try:
            yield waits_for
        except BaseException as error:
            step = functools.partial(begun.throw, error)
        else:
            step = functools.partial(begun.send, None)
        try:
            waits_for = step()
        except StopIteration:
            return


async def _finish(sending: Coroutine[Any, Any, None], waits_for: Any) -> None:
    await _rest_of(sending, waits_for)


class Direct:
    """Sends the text of one request through `outlet`. `attach` before its results, `close` after them."""

    def __init__(self, outlet: Outlet, take: Take) -> None:
        self.outlet = outlet
        self._take = take
        self._has_tried = False
        self._detach: Callable[[], None] | None = None
        self._is_waiting = False  # then all earlier text has been sent

    def attach(self, client: Any, request_id: str) -> None:
        """Starts to take the request's text, if vLLM's `client` supports that. Idempotent."""
        if not self._has_tried:
            self._has_tried = True
            try:
                self._detach = replaced.use_request_output(client, request_id, self._wrap)
            except Exception as error:  # vLLM has moved an internal
                _warn_once(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Returns the request to vLLM, and cancels unsent text. Idempotent."""
        self.outlet.close()
        self._leave()

    def _leave(self) -> None:
        self._is_waiting = False
        if self._detach is not None:
            self._detach()
            self._detach = None

    async def next(self, results: AsyncGenerator[Any, None]) -> Any:
        """The next result that was not taken. Raises the exceptions of `results` and of sending the text before it."""
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
        """Replacement of a request's `make_request_output`; it returns None if the text was sent."""

        def make_request_output(*given: Any, **also: Any) -> Any:
            is_text = given[1:] == _NOTHING_ELSE and also == _NO_ERROR and not masks
            if not is_text or not self._is_waiting or queue.output is not None:
                return theirs(*given, **also)
            try:
                body = self._take(given[0], text)
            except Exception:
                logger.exception("vLLM sends this stream's text, because the direct path failed")
                self._leave()
                body = None
            if body is None:
                return theirs(*given, **also)
            if body:
                self._is_waiting = self.outlet.push(body)
            return None

        return make_request_output


@functools.cache
def _warn_once(why: str) -> None:
    logger.warning("vLLM sends streamed text: %s", why)
