"""Long prompts, rendered in threads beside the event loop, and chat prompts before vLLM's handler asks for them.

vLLM's step from a request to tokens cannot wait, and the tokenizer works for seconds on a megabyte: meanwhile the loop
would serve nobody. So the routes render first what that step will want; where the guess is wrong, it renders itself.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

from fastapi import Request

from vllm_gptoss import _vllm
from vllm_gptoss.server.harmony.messages import Conversation
from vllm_gptoss.server.harmony.prompt import render
from vllm_gptoss.server.harmony.tokens import TooManyTokensError, take_turns
from vllm_gptoss.tools.confined import BusyError
from vllm_gptoss.tools.protocol import CALLER

QUICK = 16_384
"""Characters of text that are tokenised on the event loop, in a few milliseconds; schemas never are."""

AT_ONCE, WAITING = 4, 64
"""Callers whose prompts are rendered at once, one of each; prompts of one caller that may wait."""

_THREADS = ThreadPoolExecutor(AT_ONCE, "gptoss-render")
"""Few: they take the interpreter's lock from the event loop. They rest now and then."""

_EARLY: ContextVar[tuple[Conversation, list[int]] | None] = ContextVar("gptoss_early_prompt", default=None)

ONLY_COUNTED: ContextVar[bool] = ContextVar("gptoss_only_counted", default=False)
"""Whether nothing follows a prompt, which may then be longer than the context window."""

T = TypeVar("T")


class _Renderer:
    """Of one event loop. Callers (`tools.protocol.CALLER`) share the threads; prompts of one wait for each other."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(AT_ONCE)
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._waiting: Counter[str] = Counter()

    async def run(self, work: Callable[[], T]) -> T:
        caller = CALLER.get()
        if self._waiting[caller] > WAITING:
            raise BusyError(f"{WAITING} prompts of this API key wait to be rendered")
        self._waiting[caller] += 1
        try:
            async with self._turns.setdefault(caller, asyncio.Lock()), self._places:
                return await self._beside(work)
        finally:
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller]

    @staticmethod
    async def _beside(work: Callable[[], T]) -> T:
        unwanted = threading.Event()

        def run() -> T:
            take_turns(unwanted)
            return work()

        running = asyncio.get_running_loop().run_in_executor(_THREADS, run)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            unwanted.set()
            await asyncio.wait([running])  # its place is free when its thread is
            raise


_renderers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Renderer] = weakref.WeakKeyDictionary()


async def in_renderer(work: Callable[[], T], characters: int = QUICK + 1) -> T:
    """What `work` returns, done here where it tokenises few `characters`, else in a thread for prompts.

    Raises:
        BusyError: too many of the caller's wait.
    """
    if characters <= QUICK:
        return work()
    loop = asyncio.get_running_loop()
    return await _renderers.setdefault(loop, _Renderer()).run(work)


def is_long(raw_request: Request) -> bool:
    """Whether the body may hold more text than the event loop should tokenise."""
    length = raw_request.headers.get("content-length", "")
    return not (length.isdecimal() and len(length) < 10 and int(length) <= QUICK)


async def render_early(make: Callable[[], Conversation], most: int | None) -> None:
    """Renders what `make` gives, for `tokens_of` in the same request. Raises `TooManyTokensError`, `BusyError`."""
    try:
        prompt = make()
        _EARLY.set((prompt, await in_renderer(lambda: render(prompt, most))))
    except (TooManyTokensError, BusyError):
        raise
    except Exception:  # whatever is wrong with it, the handler meets it too, and says it in its API's words
        return


def tokens_of(prompt: Conversation) -> list[int]:
    """Prompt token ids, as they were rendered early or else rendered now."""
    early = _EARLY.get()
    return early[1] if early is not None and early[0] == prompt else render(prompt)


def settle(messages: Sequence[Any]) -> None:
    """Makes lists, in place, of the one-shot iterators that pydantic leaves in a chat request's `messages`.

    Raises:
        vLLM's validation error (400): a part or call in them is none.
    """
    for message in messages:
        for key in ("tool_calls", "content"):
            if isinstance(message, MutableMapping) and is_iterator(message.get(key)):
                try:
                    message[key] = list(message[key])
                except ValueError as error:  # pydantic's
                    raise _vllm.harmony().ValidationError(str(error), parameter="messages") from None


def is_iterator(value: Any) -> bool:
    """Whether it is neither text nor a list."""
    return value is not None and not isinstance(value, str | list)
