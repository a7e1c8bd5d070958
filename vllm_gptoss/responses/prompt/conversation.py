"""The whole conversation of a request as Harmony, and as the tokens that the engine continues."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from vllm_gptoss.harmony import messages as harmony
from vllm_gptoss.harmony.early import QUICK, in_renderer
from vllm_gptoss.harmony.messages import Conversation, Message
from vllm_gptoss.harmony.prompt import render, render_message, without_spent_analysis
from vllm_gptoss.responses.errors import ApiError
from vllm_gptoss.responses.prompt.developer import extra_words, response_format
from vllm_gptoss.responses.prompt.history import History
from vllm_gptoss.responses.prompt.toolset import Toolset
from vllm_gptoss.responses.request.create import CreateRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRUNCATION_RESERVE = 1024
"""Tokens that `truncation: auto` leaves for the answer when the request names no `max_output_tokens`."""


def build_conversation(request: CreateRequest, history: History, toolset: Toolset) -> Conversation:
    """System and developer message of this request, whatever the turns before it had, then the history."""
    words = [request.instructions or "", *history.instructions, *extra_words(request)]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Conversation(
        harmony.System(date=today, effort=request.effort, tools=tuple(toolset.system)),
        harmony.Developer(
            "\n\n".join(word for word in words if word) or None,
            tuple(toolset.developer),
            response_format(request),
        ),
        tuple(history.messages),
    )


async def rendering(conversation: Conversation, work: Callable[[], T]) -> T:
    """What `work` returns, which renders `conversation`: in a thread where that takes long."""
    texts = (conversation.developer.instructions or "", *(message.text for message in conversation.messages))
    if not conversation.developer.tools and sum(map(len, texts)) <= QUICK:
        return work()
    return await in_renderer(work)


def fit(request: CreateRequest, conversation: Conversation, window: int) -> tuple[list[int], Conversation]:
    """The prompt's token ids, shorter than `window` tokens, and the conversation that they render.

    With `truncation: auto` the oldest messages are left out until there is room for an answer.

    Raises:
        ApiError: `context_length_exceeded`.
    """
    prompt = render(conversation)
    if len(prompt) < window and request.truncation != "auto":
        return prompt, conversation
    if request.truncation == "auto":
        goal = window - min(request.max_output_tokens or TRUNCATION_RESERVE, window // 2)
        if len(prompt) <= goal:
            return prompt, conversation
        shown = without_spent_analysis(conversation.messages)
        sizes = [len(render_message(message)) for message in shown]
        kept = drop_oldest(shown, sizes, goal - (len(prompt) - sum(sizes)))
        conversation = replace(conversation, messages=tuple(kept))
        prompt = render(conversation)
        logger.info("Truncated the conversation to its last %d messages, %d tokens", len(kept), len(prompt))
        if len(prompt) < window:
            return prompt, conversation
    message = f"The input has {len(prompt)} tokens; the model's context window has {window}."
    raise ApiError(message, param="input", code="context_length_exceeded")


def drop_oldest(messages: Sequence[Message], sizes: Sequence[int], limit: int) -> list[Message]:
    """`truncation: auto`: leaves out the oldest messages until the rest has at most `limit` tokens.

    A tool's answer goes with its call, and the last message always stays.
    """
    total, first = sum(sizes), 0
    while first < len(messages) - 1 and (total > limit or messages[first].role is harmony.Role.TOOL):
        total -= sizes[first]
        first += 1
    return list(messages[first:])
