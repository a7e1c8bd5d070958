"""Compaction: the conversation so far as a summary that the model itself writes, sealed into one item.

The users' messages stay unchanged; everything else before a compaction is left out of later prompts.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace

from vllm_gptoss.server.harmony import messages as harmony
from vllm_gptoss.server.harmony.messages import Conversation, Effort, Message, Role
from vllm_gptoss.server.harmony.prompt import render, render_message, without_spent_analysis
from vllm_gptoss.server.harmony.tokens import encode, encoding
from vllm_gptoss.server.responses import ids
from vllm_gptoss.server.responses.errors import ApiError, EngineError
from vllm_gptoss.server.responses.prompt.conversation import characters_of, fitting, rendered
from vllm_gptoss.server.responses.prompt.history import SUMMARY, History
from vllm_gptoss.server.responses.prompt.toolset import Toolset
from vllm_gptoss.server.responses.request.create import CreateRequest
from vllm_gptoss.server.responses.request.items import Item
from vllm_gptoss.server.responses.run.context import ServerContext
from vllm_gptoss.server.responses.run.events import last_body
from vllm_gptoss.server.responses.run.item_writers import Style
from vllm_gptoss.server.responses.run.job import Compacted, Job, JobHooks, JobLimits
from vllm_gptoss.server.responses.run.loop import Loop
from vllm_gptoss.server.responses.run.response_object import Usage, new_response
from vllm_gptoss.server.responses.run.sampling import sampling_of
from vllm_gptoss.server.responses.state.caller import Caller

logger = logging.getLogger(__name__)

CUT = "\n[…]\n"
PER_TOKEN = 8
"""Characters: more than nearly any token of text has."""

SUMMARISE = (
    "Summarise the conversation above for the assistant that continues it and will see nothing but your summary. Keep"
    " what the user wants, decisions and their reasons, facts and values that were found, what was done, and what is"
    " left to do. Write only the summary."
)
MAX_SUMMARY = 4096
"""Tokens that a compaction may have, reasoning included."""


async def summarise(
    context: ServerContext, request: CreateRequest, caller: Caller, history: History
) -> tuple[Item, Usage]:
    """A `compaction` item for a conversation, and its usage. Raises `ApiError`, or `EngineError` when it fails."""
    text, usage = await _summary(context, request, caller, history)
    return _item(context, caller, text), usage


async def compact_conversation(
    context: ServerContext, request: CreateRequest, caller: Caller, history: History, conversation: Conversation
) -> Compacted:
    """Shortens a conversation that is about to be continued.

    The part before the last user message is summarised; so are the calls after it if nothing precedes it, or if they
    need more than half of the context window.
    """
    last = max((i for i, m in enumerate(history.messages) if m.role is Role.USER), default=0)
    earlier, newest = history.messages[:last], history.messages[last:]
    users = [message for message in earlier if message.role is Role.USER]
    half = functools.partial(fitting, newest, context.engine.max_model_len // 2)
    if not earlier or await rendered(half, characters_of(newest)) < len(newest):  # an agent's calls after the question
        earlier, newest = history.messages, [message for message in newest if message.role is Role.USER]
    text, usage = await _summary(context, request, caller, replace(history, messages=earlier))
    rest = [harmony.developer(SUMMARY + text), *newest]
    fit = functools.partial(_fitting, context, conversation, users, rest)
    kept = await rendered(fit, characters_of(history.messages))
    return Compacted(_item(context, caller, text), usage, replace(conversation, messages=(*kept, *rest)))


def _fitting(
    context: ServerContext, conversation: Conversation, users: Sequence[Message], rest: Sequence[Message]
) -> list[Message]:
    """The users' earlier messages that leave room for an answer, newest first; the summary covers the others."""
    taken = len(render(replace(conversation, messages=tuple(rest))))
    room = context.engine.max_model_len - min(MAX_SUMMARY, context.engine.max_model_len // 4) - taken
    kept = users[len(users) - fitting(users[::-1], room) :]
    if len(kept) < len(users):
        logger.info("Compaction: the oldest %d user messages are left to the summary", len(users) - len(kept))
    return list(kept)


def _item(context: ServerContext, caller: Caller, text: str) -> Item:
    sealed = context.keys.seal(text, tenant=caller.tenant, purpose="compaction")
    return {"id": ids.new("cmp"), "type": "compaction", "encrypted_content": sealed}


async def _summary(
    context: ServerContext, request: CreateRequest, caller: Caller, history: History
) -> tuple[str, Usage]:
    """The summary of a history and its usage. A history above the context window is summarised in parts."""
    if not history.messages:
        raise ApiError("There is nothing to compact.", param="input", code="missing_required_parameter")
    window = context.engine.max_model_len
    reserve = min(MAX_SUMMARY, window // 4)
    left = without_spent_analysis(history.messages)
    text, usage = "", Usage()
    while True:
        before = [harmony.developer(SUMMARY + text)] if text else []
        frame = _question(request, history, before)
        split = functools.partial(_next_part, frame, left, window - reserve)
        part, left = await rendered(split, characters_of(left))
        text, cost = await _ask(context, request, caller, _question(request, history, [*before, *part]), reserve)
        usage = usage + cost
        if not left:
            return text, usage
        logger.info("Compaction: %d messages are beyond the context window and are summarised next", len(left))


def _question(request: CreateRequest, history: History, messages: Sequence[Message]) -> Conversation:
    words = "\n\n".join(filter(None, [request.instructions, *history.instructions]))
    asked = (*messages, harmony.user(SUMMARISE))
    return Conversation(harmony.System(effort=Effort.LOW), harmony.Developer(words or None), asked)


def _next_part(frame: Conversation, left: Sequence[Message], window: int) -> tuple[list[Message], list[Message]]:
    return split_off(left, window - len(render(frame)))


def split_off(messages: Sequence[Message], room: int) -> tuple[list[Message], list[Message]]:
    """As many of the first messages as have `room` tokens together, and the rest; at least one.

    A single message above `room` loses its middle. Raises `ApiError` if there is no room for any token.
    """
    if count := fitting(messages, room):
        return list(messages[:count]), list(messages[count:])
    frame = len(render_message(replace(messages[0], text=""))) + len(encode(CUT))
    half = (room - frame) // 2 - 1
    if half < 1:
        message = "The instructions leave no room in the model's context window."
        raise ApiError(message, param="instructions", code="context_length_exceeded")
    text = messages[0].text
    logger.warning("Compaction: a message of %d characters lost its middle: the window is smaller", len(text))
    first, last = encode(text[: half * PER_TOKEN])[:half], encode(text[-half * PER_TOKEN :])[-half:]
    shown = f"{encoding().decode(first)}{CUT}{encoding().decode(last)}"
    return [replace(messages[0], text=shown)], list(messages[1:])


async def _ask(
    context: ServerContext, request: CreateRequest, caller: Caller, conversation: Conversation, limit: int
) -> tuple[str, Usage]:
    """The model's answer, in at most `limit` tokens, and its usage."""
    name, lora = context.models(request.model)
    job = Job(
        body=new_response(request, ids.new("resp"), name, context.engine.defaults),
        conversation=conversation,
        prompt=await rendered(lambda: render(conversation), characters_of(conversation.messages)),
        engine=context.engine,
        sampling=sampling_of(request, caller, lora),
        toolset=Toolset(),
        style=Style(reasoning=False),
        hooks=JobHooks(),
        limits=JobLimits(output_tokens=limit),
    )
    loop = Loop(job)
    body = await last_body(loop.run())
    if body["status"] == "failed":
        raise EngineError(body["error"]["message"])
    answers = [item for item in body["output"] if item["type"] == "message"]
    return "\n".join(part["text"] for item in answers for part in item["content"]), loop.usage
