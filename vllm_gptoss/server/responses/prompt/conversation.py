"""The whole conversation of a request as Harmony, and as the tokens that the engine continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from vllm_gptoss.server.chat.early import QUICK, in_renderer
from vllm_gptoss.server.harmony import messages as harmony
from vllm_gptoss.server.harmony.messages import Conversation, Message
from vllm_gptoss.server.harmony.prompt import render, render_message, today, without_spent_analysis
from vllm_gptoss.server.harmony.tokens import LONGEST, TooManyTokensError
from vllm_gptoss.server.http.error_format import count_limit, overflow
from vllm_gptoss.server.responses.errors import ApiError
from vllm_gptoss.server.responses.prompt.developer import extra_words, response_format
from vllm_gptoss.server.responses.prompt.history import History
from vllm_gptoss.server.responses.prompt.toolset import Toolset
from vllm_gptoss.server.responses.request.create import CreateRequest
from vllm_gptoss.tools.confined import BusyError

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRUNCATION_RESERVE = 1024
"""Tokens that `truncation: auto` leaves for the answer when the request names no `max_output_tokens`."""


def build_conversation(request: CreateRequest, history: History, toolset: Toolset) -> Conversation:
    """System and developer message of this request, not of earlier turns, then the history."""
    words = [request.instructions or "", *history.instructions, *extra_words(request)]
    return Conversation(
        harmony.System(date=today(), effort=request.effort, tools=tuple(toolset.system)),
        harmony.Developer(
            "\n\n".join(word for word in words if word) or None, tuple(toolset.developer), response_format(request)
        ),
        tuple(history.messages),
    )


async def rendering(conversation: Conversation, work: Callable[[], T], window: int) -> T:
    """Runs `work`, which renders `conversation`: in a thread if the conversation is long.

    Raises:
        ApiError: the conversation is longer than any of `window` tokens, or too many of the caller's wait.
    """
    characters = len(conversation.developer.instructions or "") + characters_of(conversation.messages)
    if characters > window * LONGEST:
        raise too_long(window)
    return await rendered(work, QUICK + 1 if conversation.developer.tools else characters)


async def rendered(work: Callable[[], T], characters: int) -> T:
    """As `in_renderer`. Raises `ApiError` (429) where too many of the caller's wait."""
    try:
        return await in_renderer(work, characters)
    except BusyError as error:
        raise ApiError(f"{error}.", code="rate_limit_exceeded", status=429) from None


def characters_of(messages: Sequence[Message]) -> int:
    """Characters of the messages' texts."""
    return sum(len(message.text) for message in messages)


def too_long(window: int, tokens: int | None = None) -> ApiError:
    """The error for an input of `tokens` that leaves no room for an answer; None: counting stopped at `count_limit`."""
    return ApiError(overflow(window, tokens, "input"), param="input", code="context_length_exceeded")


def fit(request: CreateRequest, conversation: Conversation, window: int) -> tuple[list[int], Conversation]:
    """The prompt's token ids, shorter than `window` tokens, and the conversation that they render.

    With `truncation: auto` the oldest messages are left out until there is room for an answer.

    Raises:
        ApiError: `context_length_exceeded`.
    """
    is_cut = request.truncation == "auto"
    goal = window - min(request.max_output_tokens or TRUNCATION_RESERVE, window // 2) if is_cut else window - 1
    prompt: list[int] = []
    with suppress(TooManyTokensError):
        prompt = render(conversation, goal if is_cut else count_limit(window))
        if len(prompt) <= goal:
            return prompt, conversation
    if not is_cut:
        raise too_long(window, len(prompt) or None)
    try:
        frame = len(render(replace(conversation, messages=()), window))
        kept = newest(without_spent_analysis(conversation.messages), goal - frame)
        conversation = replace(conversation, messages=tuple(kept))
        prompt = render(conversation, window - 1)
    except TooManyTokensError:
        raise too_long(window) from None
    logger.info("Truncated the conversation to its last %d messages, %d tokens", len(kept), len(prompt))
    return prompt, conversation


def fitting(messages: Sequence[Message], limit: int) -> int:
    """How many of the first messages have at most `limit` tokens together; reads no more of them than that."""
    for count, message in enumerate(messages):
        try:
            limit -= len(render_message(message, max(0, limit)))
        except TooManyTokensError:
            return count
        if limit < 0:
            return count
    return len(messages)


def newest(messages: Sequence[Message], limit: int) -> list[Message]:
    """`truncation: auto`: as many of the last messages as have at most `limit` tokens; the last always stays.

    A tool's answer is dropped with its call.
    """
    first = len(messages) - max(1, fitting(messages[::-1], limit))
    while first < len(messages) - 1 and messages[first].role is harmony.Role.TOOL:
        first += 1
    return list(messages[first:])
