"""From a checked request to a `Job`: history, tools, prompt, sampling."""

from __future__ import annotations

import asyncio
import functools
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vllm_gptoss.server.harmony.messages import Conversation
from vllm_gptoss.server.harmony.prompt import is_longer, render
from vllm_gptoss.server.harmony.tokens import TooManyTokensError
from vllm_gptoss.server.responses import ids
from vllm_gptoss.server.responses.errors import ApiError, id_taken
from vllm_gptoss.server.responses.prompt.constraint import Constraints, constraints
from vllm_gptoss.server.responses.prompt.conversation import build_conversation, fit, rendering
from vllm_gptoss.server.responses.prompt.history import History, HistoryReader
from vllm_gptoss.server.responses.prompt.open_tools import Opener, raw_recipients
from vllm_gptoss.server.responses.prompt.toolset import Toolset
from vllm_gptoss.server.responses.request.create import CreateRequest
from vllm_gptoss.server.responses.request.items import Item
from vllm_gptoss.server.responses.request.tool_params import WEB_SEARCH
from vllm_gptoss.server.responses.run.compaction import compact_conversation
from vllm_gptoss.server.responses.run.context import ServerContext
from vllm_gptoss.server.responses.run.item_writers import Style
from vllm_gptoss.server.responses.run.job import Compacted, Compaction, Job, JobHooks, JobLimits
from vllm_gptoss.server.responses.run.response_object import new_response
from vllm_gptoss.server.responses.run.sampling import sampling_of
from vllm_gptoss.server.responses.state.caller import Caller
from vllm_gptoss.server.responses.state.patience import update_at_last
from vllm_gptoss.server.responses.state.previous import Previous, previous_items
from vllm_gptoss.server.responses.state.stored import stored_request
from vllm_gptoss.tools.protocol import ID, ToolKind, ToolResult

logger = logging.getLogger(__name__)

MANY = 500
"""Items that are read as messages on the event loop in a few milliseconds."""

COMPACT_AT = 0.8
"""Share of the context window at which `context_management` compacts when the request names no threshold."""


async def build_job(
    context: ServerContext,
    request: CreateRequest,
    caller: Caller,
    identifier: str,
    *,
    queued: bool = False,
    connects: bool = True,
) -> Job:
    """The response `identifier`, ready to run: history, toolset, prompt, job. The caller closes the job's tools.

    Opening the tools is the only effect on anything but the request. `connects=False` opens none, and such a job cannot
    run: it has the prompt.

    Raises:
        ApiError: the request has a fault that can be found before the first token.
    """
    name, lora = context.models(request.model)
    await _check_id_and_store(context, request, caller)
    previous = await read_previous(context, request, caller)
    if caller.adds_search:
        _leave_out_search(context, request)
    history = await read_history(context, request, previous, caller)
    root = previous.root or identifier
    notebook = await _notebook(context, request, caller, previous, root)
    toolset = await _open_tools(context, request, caller, previous, notebook, identifier, connects=connects)
    try:
        compaction, tokens, conversation = await _prompt(context, request, history, toolset)
        strict = context.options.strict_tools
        # A grammar ends with the message; `ignore_eos` continues after it.
        is_free = request.ignore_eos or not connects
        held = Constraints() if is_free else await constraints(request, toolset, strict_tools=strict)
        status = "queued" if queued else "in_progress"
        return Job(
            body=new_response(request, identifier, name, context.engine.defaults, status),
            conversation=conversation,
            prompt=tokens,
            engine=context.engine,
            sampling=sampling_of(request, caller, lora, held.first),
            tag_after_call=held.later,
            answer_is_held=held.answers,
            toolset=toolset,
            style=_style(context, request, caller, toolset),
            hooks=_Hooks(context, request, caller, root, notebook, history, conversation),
            limits=_limits(context, request),
            approvals=history.approvals,
            listed=frozenset(history.listed),
            queued=queued,
            ignores_end=request.ignore_eos,
            compaction=compaction,
        )
    except BaseException:
        await toolset.close()
        raise


async def read_previous(context: ServerContext, request: CreateRequest, caller: Caller) -> Previous:
    """The items before the request's own, of the response or conversation that it continues. Raises `ApiError`."""
    if len(request.items) > context.options.max_input_items:
        raise ApiError(f"More than {context.options.max_input_items} items.", param="input")
    store = context.need_store("conversation") if request.conversation_id else context.store
    return await previous_items(request, caller, store)


async def read_history(context: ServerContext, request: CreateRequest, previous: Previous, caller: Caller) -> History:
    """All items of the conversation, the request's own last, as Harmony messages. Raises `ApiError`."""

    def unseal(text: str, purpose: str) -> str | None:
        return context.keys.open(text, tenant=caller.tenant, purpose=purpose)

    reader = HistoryReader(previous.hidden, unseal, raw_recipients(request.tool_list, request.tool_choice))
    before = [*request.opening, *previous.items]
    items = [*before, *request.items]
    if len(items) > MANY:
        return await asyncio.to_thread(reader.read, items, own_from=len(before))
    return reader.read(items, own_from=len(before))


async def _check_id_and_store(context: ServerContext, request: CreateRequest, caller: Caller) -> None:
    if request.request_id and context.store and await context.store.exists(caller.tenant, request.request_id):
        raise id_taken(request.request_id)
    if request.store and context.store is None:
        raise ApiError("This server stores nothing; send 'store': false.", param="store", code="store_disabled")


async def _open_tools(
    context: ServerContext,
    request: CreateRequest,
    caller: Caller,
    previous: Previous,
    notebook: str,
    identifier: str,
    *,
    connects: bool,
) -> Toolset:
    notebook_of = functools.partial(context.containers.notebook, caller=caller)
    calls = [*previous.hidden.values(), *_unstored(previous, request)]
    listings = None if connects else [i for i in (*previous.items, *request.items) if i["type"] == "mcp_list_tools"]
    opener = Opener(context.providers, identifier, notebook, notebook_of, calls, caller.owner, listings)
    return await opener.open(request.tool_list, request.tool_choice)


async def _notebook(
    context: ServerContext, request: CreateRequest, caller: Caller, previous: Previous, root: str
) -> str:
    """Key of the python state of a request that names no container: the state of the conversation's last call, also for
    clients that echo items. Without a call, a key of the chain or conversation.
    """
    items = reversed([*previous.items, *request.items])
    called = (_container(item, previous) for item in items if item["type"] == "code_interpreter_call")
    last = next(filter(ids.is_one, called), None)
    used = await context.containers.used(last, caller) if last else None
    return used or f"{caller.tenant}:{request.conversation_id or root}"


def _container(item: Item, previous: Previous) -> str:
    """The container of a python call. The stored one wins: a client may echo the item as its stream began it."""
    recall = (previous.hidden.get(item.get("id", "")) or {}).get("recall") or {}
    return str(recall.get("container") or item.get("container_id") or "")


def _unstored(previous: Previous, request: CreateRequest) -> list[dict[str, Any]]:
    """Python calls that are in the request and not in the store. Only their container is known."""
    items = [item for item in request.items if item["type"] == "code_interpreter_call"]
    unknown = [item for item in items if item.get("id", "") not in previous.hidden]
    named = (str(item.get("container_id") or "") for item in unknown)
    places = (name if ID.fullmatch(name) else "" for name in named)
    return [{"recipient": ToolKind.PYTHON, "recall": {"container": name}} for name in places]


def _leave_out_search(context: ServerContext, request: CreateRequest) -> None:
    """Removes `web_search` where there is no browser: Codex sends it with each request, wanted or not."""
    provider = context.providers.of_kind(ToolKind.BROWSER)
    if provider is not None and not provider.unavailable:
        return
    kept = [tool for tool in request.tool_list if tool["type"] not in WEB_SEARCH]
    if len(kept) < len(request.tool_list):
        _say_that_search_is_left_out()
        request.tools = kept


@functools.cache
def _say_that_search_is_left_out() -> None:
    """Logs once per process, not with every request."""
    logger.warning("Codex offers web_search; this server has no browser (--tool-server), so it is left out")


async def _prompt(
    context: ServerContext, request: CreateRequest, history: History, toolset: Toolset
) -> tuple[Compaction, list[int], Conversation]:
    """The conversation and the tokens that render it; no tokens if it fits only after compaction.

    Raises `ApiError`: `context_length_exceeded`.
    """
    window = context.engine.max_model_len
    conversation = build_conversation(request, history, toolset)

    def render_it() -> tuple[Compaction, list[int], Conversation]:
        compaction = _compaction(context, request, history, conversation)
        if compaction is Compaction.NONE:
            return compaction, *fit(request, conversation, window)
        with suppress(TooManyTokensError):
            return compaction, render(conversation, window), conversation
        return compaction, [], conversation

    return await rendering(conversation, render_it, window)


def _compaction(
    context: ServerContext, request: CreateRequest, history: History, conversation: Conversation
) -> Compaction:
    """Whether the request has a `compaction_trigger`, or its conversation exceeds the threshold."""
    wanted = history.wants_compaction
    for entry in request.context_management or ():
        limit = entry.compact_threshold or int(context.engine.max_model_len * COMPACT_AT)
        wanted = wanted or is_longer(conversation, limit)
    if not wanted:
        return Compaction.NONE
    if not history.messages:
        raise ApiError("There is nothing to compact.", param="input", code="missing_required_parameter")
    return Compaction.ONLY if history.wants_compaction else Compaction.FIRST


def _limits(context: ServerContext, request: CreateRequest) -> JobLimits:
    engine = context.engine
    wanted = request.max_output_tokens or engine.defaults.get("max_tokens")
    limits = [limit for limit in (wanted, engine.max_output_tokens) if limit is not None]
    return JobLimits(
        output_tokens=min(limits, default=None),
        tool_calls=request.max_tool_calls,
        rounds=context.options.max_tool_rounds,
        tool_timeout=context.options.tool_timeout,
        stops=request.stops,
        min_tokens=request.min_tokens or 0,
        one_call=request.parallel_tool_calls is False,
    )


def _style(context: ServerContext, request: CreateRequest, caller: Caller, toolset: Toolset) -> Style:
    includes, reasoning = request.includes, request.reasoning
    seal = functools.partial(context.keys.seal, tenant=caller.tenant, purpose="reasoning")
    return Style(
        reasoning=request.include_reasoning,
        summary=(reasoning.summary or reasoning.generate_summary) if reasoning else None,
        seal=seal if "reasoning.encrypted_content" in includes else None,
        logprobs="message.output_text.logprobs" in includes,
        outputs="code_interpreter_call.outputs" in includes,
        sources="web_search_call.action.sources" in includes,
        source=toolset.source,
    )


@dataclass(frozen=True, slots=True)
class _Hooks(JobHooks):
    """`JobHooks` of a request. `root`: the first response of its chain. `notebook` keys the python tool's state."""

    context: ServerContext
    request: CreateRequest
    caller: Caller
    root: str
    notebook: str
    history: History
    conversation: Conversation

    async def commit(self, body: dict[str, Any], hidden: dict[str, Any]) -> None:
        request, store = self.request, self.context.store
        stored = stored_request(request, self.caller.tenant, body)
        stored.hidden, stored.root = hidden, self.root
        is_finished = body["status"] in ("completed", "incomplete")
        if request.stores and store:
            conversation = request.conversation_id if is_finished else None
            if not request.background:
                await store.save(stored, conversation)
            elif is_finished:
                await update_at_last(store, stored, conversation)
            else:
                await store.update(stored, conversation)
        elif request.conversation_id and store and is_finished:
            await store.conversations.append(request.conversation_id, stored.items_with_hidden())
        if is_finished and not request.stores and self.caller.memory is not None:
            self.caller.memory.add(stored)

    async def tool_ended(self, recipient: str, result: ToolResult) -> None:
        if result.container_id:
            await self.context.containers.remember(result.container_id, self.caller.tenant, self.notebook)
        if result.error:
            self.context.tool_errors.add(self.caller.tenant, recipient, result.error)

    async def compact(self) -> Compacted:
        return await compact_conversation(self.context, self.request, self.caller, self.history, self.conversation)
