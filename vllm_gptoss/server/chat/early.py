"""Renders long prompts in threads, and chat prompts before vLLM's handler needs them.

vLLM's step from a request to tokens is synchronous, and a megabyte takes seconds to tokenise, during which the event
loop would stop. Our routes therefore render the prompt first; that step renders it again if it needs another one.
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
"""Characters of text that are tokenised on the event loop, in a few milliseconds. Schemas never are."""

AT_ONCE, WAITING = 4, 64
"""Callers with a prompt in a thread at once, one each; waiting prompts per caller."""

_THREADS = ThreadPoolExecutor(AT_ONCE, "gptoss-render")
"""Few, because they take the interpreter's lock from the event loop; `take_turns` makes them sleep."""

_EARLY: ContextVar[tuple[tuple[Conversation, list[int]], ...]] = ContextVar("gptoss_early_prompts", default=())

ONLY_COUNTED: ContextVar[bool] = ContextVar("gptoss_only_counted", default=False)
"""Whether tokens are only counted; the prompt may then exceed the context window."""

T = TypeVar("T")


class _Renderer:
    """The threads of one event loop, shared by callers (`tools.protocol.CALLER`); a caller uses one at a time."""

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
            await asyncio.wait([running])  # the thread still occupies its place
            raise


_renderers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Renderer] = weakref.WeakKeyDictionary()


async def in_renderer(work: Callable[[], T], characters: int = QUICK + 1) -> T:
    """Runs `work` here if it tokenises few `characters`, otherwise in a thread for prompts.

    Raises:
        BusyError: too many prompts of the caller are waiting.
    """
    if characters <= QUICK:
        return work()
    loop = asyncio.get_running_loop()
    return await _renderers.setdefault(loop, _Renderer()).run(work)


def is_long(raw_request: Request) -> bool:
    """Whether the body may have more than `QUICK` characters of text."""
    length = raw_request.headers.get("content-length", "")
    return not (length.isdecimal() and len(length) < 10 and int(length) <= QUICK)


async def render_early(make: Callable[[], Conversation], most: int | None) -> None:
    """Renders the result of `make` for `tokens_of` in the same task. Raises `TooManyTokensError`, `BusyError`."""
    try:
        prompt = make()
        tokens = await in_renderer(lambda: render(prompt, most))
        _EARLY.set((*_EARLY.get(), (prompt, tokens)))
    except (TooManyTokensError, BusyError):
        raise
    except Exception:  # the handler meets the same error and reports it in its API's format
        return


def tokens_of(prompt: Conversation) -> list[int]:
    """Prompt token ids: those that `render_early` made, once each, or else rendered here."""
    early = _EARLY.get()
    if not early or early[0][0] != prompt:
        return render(prompt)
    _EARLY.set(early[1:])  # a batch takes its prompts in order
    return early[0][1]


def settle(messages: Sequence[Any]) -> None:
    """Replaces the one-shot iterators that pydantic leaves in a chat request's `messages` by lists.

    Raises:
        vLLM's validation error (400): a content part or call is invalid.
    """
    for message in messages:
        for key in ("tool_calls", "content"):
            if isinstance(message, MutableMapping) and is_iterator(message.get(key)):
                try:
                    message[key] = list(message[key])
                except ValueError as error:  # pydantic's
                    raise _vllm.harmony().ValidationError(str(error), parameter="messages") from None


def is_iterator(value: Any) -> bool:
    """Whether `value` is one of those iterators."""
    return value is not None and not isinstance(value, str | list)
