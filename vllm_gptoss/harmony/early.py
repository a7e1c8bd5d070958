"""Long chat prompts, rendered in a thread before vLLM's handler asks for them on the event loop.

vLLM's step from a request to tokens cannot wait, and the tokenizer works for seconds on a megabyte: meanwhile the loop
would serve nobody. So the routes render first what that step will want; where the guess is wrong, it renders itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

from fastapi import Request

from vllm_gptoss import _vllm
from vllm_gptoss.harmony.messages import Conversation
from vllm_gptoss.harmony.prompt import render
from vllm_gptoss.harmony.tokens import take_turns

QUICK = 16_384
"""Characters of text that are tokenised on the event loop, in a few milliseconds; schemas never are."""

_RENDERER = ThreadPoolExecutor(1, "gptoss-render", initializer=take_turns)
"""One thread: several would take the interpreter's lock from the event loop in turns. It rests now and then."""

_EARLY: ContextVar[tuple[Conversation, list[int]] | None] = ContextVar("gptoss_early_prompt", default=None)

T = TypeVar("T")


async def in_renderer(work: Callable[[], T]) -> T:
    """What `work` returns, done in the thread for prompts."""
    return await asyncio.get_running_loop().run_in_executor(_RENDERER, work)


def is_long(raw_request: Request) -> bool:
    """Whether the body may hold more text than the event loop should tokenise."""
    length = raw_request.headers.get("content-length", "")
    return not (length.isdecimal() and len(length) < 10 and int(length) <= QUICK)


async def render_early(make: Callable[[], Conversation]) -> None:
    """Renders what `make` gives, for `tokens_of` in the same request."""
    try:
        prompt = make()
        _EARLY.set((prompt, await in_renderer(lambda: render(prompt))))
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
