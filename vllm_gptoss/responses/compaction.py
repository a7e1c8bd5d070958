"""Compaction: the conversation so far as a summary that the model itself writes, sealed into one item.

The users' own messages stay as they were said; everything else before a compaction is left out of later prompts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_gptoss.harmony import messages as harmony
from vllm_gptoss.harmony.messages import Conversation, Effort, Role
from vllm_gptoss.harmony.prompt import render
from vllm_gptoss.responses import ids, resource
from vllm_gptoss.responses.errors import ApiError, EngineError
from vllm_gptoss.responses.history import SUMMARY, History
from vllm_gptoss.responses.input import Item
from vllm_gptoss.responses.job import Compacted, Job
from vllm_gptoss.responses.loop import Loop
from vllm_gptoss.responses.request import CreateRequest
from vllm_gptoss.responses.resource import Usage
from vllm_gptoss.responses.toolset import Toolset
from vllm_gptoss.responses.writers import Style

if TYPE_CHECKING:
    from vllm_gptoss.responses.past import Caller
    from vllm_gptoss.responses.service import Service

SUMMARISE = (
    "Summarise the conversation above for the assistant that continues it and will see nothing but your summary. Keep"
    " what the user wants, decisions and their reasons, facts and values that were found, what was done, and what is"
    " left to do. Write only the summary."
)
MAX_SUMMARY = 4096
"""Tokens that a compaction may have, reasoning included."""


async def summarise(service: Service, request: CreateRequest, caller: Caller, history: History) -> tuple[Item, Usage]:
    """A `compaction` item for a conversation, and what it cost. Raises `ApiError`, or `EngineError` when it fails."""
    text, usage = await _summary(service, request, caller, history)
    sealed = service.sealer.seal(text, tenant=caller.tenant, purpose="compaction")
    return {"id": ids.new("cmp"), "type": "compaction", "encrypted_content": sealed}, usage


async def compact_conversation(
    service: Service, request: CreateRequest, caller: Caller, history: History, conversation: Conversation
) -> Compacted:
    """Shortens a conversation that is about to be continued: what came before the last user message is summarised."""
    last = max((i for i, m in enumerate(history.messages) if m.role is Role.USER), default=0)
    earlier = replace(history, messages=history.messages[:last] or history.messages)
    text, usage = await _summary(service, request, caller, earlier)
    sealed = service.sealer.seal(text, tenant=caller.tenant, purpose="compaction")
    item: Item = {"id": ids.new("cmp"), "type": "compaction", "encrypted_content": sealed}
    users = [message for message in history.messages[:last] if message.role is Role.USER]
    kept = (*users, harmony.developer(SUMMARY + text), *history.messages[last:])
    return Compacted(item, usage, replace(conversation, messages=kept))


async def _summary(service: Service, request: CreateRequest, caller: Caller, history: History) -> tuple[str, Usage]:
    if not history.messages:
        raise ApiError("There is nothing to compact.", param="input", code="missing_required_parameter")
    name, lora = service.models(request.model)
    conversation = Conversation(
        harmony.System(effort=Effort.LOW),
        harmony.Developer("\n\n".join(filter(None, [request.instructions, *history.instructions])) or None),
        (*history.messages, harmony.user(SUMMARISE)),
    )
    prompt = render(conversation)
    if len(prompt) >= service.engine.max_model_len:
        message = f"The input has {len(prompt)} tokens; the window has {service.engine.max_model_len}."
        raise ApiError(message, param="input", code="context_length_exceeded")

    async def forget(body: dict[str, Any], hidden: dict[str, Any]) -> None:
        del body, hidden

    job = Job(
        body=resource.begin(request, ids.new("resp"), name, service.engine.defaults),
        conversation=conversation,
        prompt=prompt,
        engine=service.engine,
        sampling=replace(service.sampling(request, Toolset(), caller, lora), structural_tag=None),
        toolset=Toolset(),
        style=Style(reasoning=False),
        commit=forget,
        budget=MAX_SUMMARY,
    )
    loop = Loop(job)
    body: dict[str, Any] = {}
    async for batch in loop.run():
        body = batch[-1].get("response", body) if batch else body
    if body["status"] == "failed":
        raise EngineError(body["error"]["message"])
    answers = [item for item in body["output"] if item["type"] == "message"]
    return "\n".join(part["text"] for item in answers for part in item["content"]), loop.usage
