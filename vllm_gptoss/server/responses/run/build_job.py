"""From a checked request to a `Job`: what came before, its tools, its prompt, its sampling."""

from __future__ import annotations

import asyncio
import functools
import logging
from contextlib import suppress
from typing import Any

from vllm_gptoss.server.harmony.messages import Conversation
from vllm_gptoss.server.harmony.prompt import is_longer, render
from vllm_gptoss.server.harmony.tokens import TooManyTokensError
from vllm_gptoss.server.responses import ids
from vllm_gptoss.server.responses.errors import ApiError, id_taken
from vllm_gptoss.server.responses.prompt.constraint import Constraints, constraints
from vllm_gptoss.server.responses.prompt.conversation import build_conversation, fit, rendering
from vllm_gptoss.server.responses.prompt.history import History, HistoryReader
from vllm_gptoss.server.responses.prompt.toolset import Opener, Toolset
from vllm_gptoss.server.responses.request.create import CreateRequest
from vllm_gptoss.server.responses.request.items import Item
from vllm_gptoss.server.responses.request.tool_params import WEB_SEARCH
from vllm_gptoss.server.responses.run.compaction import compact_conversation
from vllm_gptoss.server.responses.run.context import ServerContext
from vllm_gptoss.server.responses.run.item_writers import Style
from vllm_gptoss.server.responses.run.job import Compacted, Compaction, Job, JobLimits
from vllm_gptoss.server.responses.run.response_object import new_response
from vllm_gptoss.server.responses.run.sampling import sampling_of
from vllm_gptoss.server.responses.state.caller import Caller
from vllm_gptoss.server.responses.state.patience import update_at_last
from vllm_gptoss.server.responses.state.previous import Previous, previous_items
from vllm_gptoss.server.responses.state.stored import Stored
from vllm_gptoss.tools.protocol import ID, ToolKind

logger = logging.getLogger(__name__)

MANY = 500
"""Items that are read as messages on the event loop in a few milliseconds."""

COMPACT_AT = 0.8
"""Share of the context window at which `context_management` compacts when the request names no threshold."""


async def build_job(
    context: ServerContext, request: CreateRequest, caller: Caller, identifier: str, *, queued: bool = False
) -> Job:
    """The response `identifier`, ready to run; its tools are open, and are the caller's to close.

    Raises:
        ApiError: whatever can be found wrong before the first token.
    """
    name, lora = context.models(request.model)
    await _check_id_and_store(context, request, caller)
    previous = await read_previous(context, request, caller)
    if caller.adds_search:
        _leave_out_search(context, request)
    root = previous.root or identifier
    hooks = _Hooks(context, request, caller, root, await _notebook(context, request, caller, previous, root))
    toolset = await _open_tools(context, request, caller, previous, hooks.notebook, identifier)
    try:
        read = functools.partial(read_history, context, request, previous, caller, toolset)
        is_long = len(previous.items) + len(request.items) > MANY
        history = hooks.history = await asyncio.to_thread(read) if is_long else read()
        conversation = hooks.conversation = build_conversation(request, history, toolset)
        work = functools.partial(_prompt, context, request, history, conversation)
        compaction, prompt, conversation = await rendering(conversation, work, context.engine.max_model_len)
        strict = context.options.strict_tools
        # A grammar ends where the message does; `ignore_eos` asks for more.
        held = Constraints() if request.ignore_eos else await constraints(request, toolset, strict_tools=strict)
        status = "queued" if queued else "in_progress"
        return Job(
            body=new_response(request, identifier, name, context.engine.defaults, status),
            conversation=conversation,
            prompt=prompt,
            engine=context.engine,
            sampling=sampling_of(request, caller, lora, held.first),
            tag_after_call=held.later,
            answer_is_held=held.answers,
            toolset=toolset,
            style=_style(context, request, caller, toolset),
            hooks=hooks,
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
    """The items before the request's own, from the response or conversation it goes on from. Raises `ApiError`."""
    if len(request.items) > context.options.max_input_items:
        raise ApiError(f"More than {context.options.max_input_items} items.", param="input")
    store = context.need_store("conversation") if request.conversation_id else context.store
    return await previous_items(request, caller, store)


def read_history(
    context: ServerContext, request: CreateRequest, previous: Previous, caller: Caller, toolset: Toolset
) -> History:
    """All items of the conversation, the request's own last, as Harmony messages. Raises `ApiError`."""

    def unseal(text: str, purpose: str) -> str | None:
        return context.keys.open(text, tenant=caller.tenant, purpose=purpose)

    raw = frozenset(route.recipient for route in toolset.routes.values() if route.raw)
    reader = HistoryReader(previous.hidden, unseal, raw)
    before = [*request.opening, *previous.items]
    return reader.read([*before, *request.items], own_from=len(before))


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
) -> Toolset:
    async def notebook_of(container_id: str) -> str:
        return await context.containers.notebook(container_id, caller)

    calls = [*previous.hidden.values(), *_unstored(previous, request)]
    opener = Opener(context.providers, identifier, notebook, notebook_of, calls, caller.owner)
    return await opener.open(request.tool_list, request.tool_choice)


async def _notebook(
    context: ServerContext, request: CreateRequest, caller: Caller, previous: Previous, root: str
) -> str:
    """The python state that a request goes on with where it names no container: that of the conversation's last call,
    so that a client which echoes its items finds what they left. Else one of the chain's, or the conversation's, own.
    """
    items = reversed([*previous.items, *request.items])
    called = (_container(item, previous) for item in items if item["type"] == "code_interpreter_call")
    last = next(filter(ids.is_one, called), None)
    used = await context.containers.used(last, caller) if last else None
    return used or f"{caller.tenant}:{request.conversation_id or root}"


def _container(item: Item, previous: Previous) -> str:
    """What is stored knows better than a client that keeps an item as its stream began it."""
    recall = (previous.hidden.get(item.get("id", "")) or {}).get("recall") or {}
    return str(recall.get("container") or item.get("container_id") or "")


def _unstored(previous: Previous, request: CreateRequest) -> list[dict[str, Any]]:
    """Calls of python that only the client has kept: that they ran, and where, is all that is known of them."""
    items = [item for item in request.items if item["type"] == "code_interpreter_call"]
    unknown = [item for item in items if item.get("id", "") not in previous.hidden]
    named = (str(item.get("container_id") or "") for item in unknown)
    places = (name if ID.fullmatch(name) else "" for name in named)
    return [{"recipient": ToolKind.PYTHON, "recall": {"container": name}} for name in places]


def _leave_out_search(context: ServerContext, request: CreateRequest) -> None:
    """A search that an agent offers by itself is no reason to refuse its user, if nobody has set up a browser."""
    provider = context.providers.of_kind(ToolKind.BROWSER)
    if provider is not None and not provider.unavailable:
        return
    kept = [tool for tool in request.tool_list if tool["type"] not in WEB_SEARCH]
    if len(kept) < len(request.tool_list):
        _say_that_search_is_left_out()
        request.tools = kept


@functools.cache
def _say_that_search_is_left_out() -> None:
    """Once: it would be a line for every request."""
    logger.warning("Codex offers web_search; this server has no browser (--tool-server), so it is left out")


def _prompt(
    context: ServerContext, request: CreateRequest, history: History, conversation: Conversation
) -> tuple[Compaction, list[int], Conversation]:
    """Whether the conversation is compacted first, its tokens, and what they render. Long texts take their time."""
    compaction = _compaction(context, request, history, conversation)
    if compaction is Compaction.NONE:
        return compaction, *fit(request, conversation, context.engine.max_model_len)
    with suppress(TooManyTokensError):
        return compaction, render(conversation, context.engine.max_model_len), conversation
    return compaction, [], conversation  # it is rendered once it is compacted


def _compaction(
    context: ServerContext, request: CreateRequest, history: History, conversation: Conversation
) -> Compaction:
    """Whether the request wants its conversation shortened first, or its threshold is passed."""
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

    def seal(text: str) -> str:
        return context.keys.seal(text, tenant=caller.tenant, purpose="reasoning")

    return Style(
        reasoning=request.include_reasoning,
        summary=(reasoning.summary or reasoning.generate_summary) if reasoning else None,
        seal=seal if "reasoning.encrypted_content" in includes else None,
        logprobs="message.output_text.logprobs" in includes,
        outputs="code_interpreter_call.outputs" in includes,
        sources="web_search_call.action.sources" in includes,
        source=toolset.source,
    )


class _Hooks:
    """`JobHooks` of a request. `root`: the first response of its chain. `notebook` keys the python tool's state."""

    history: History
    conversation: Conversation

    def __init__(
        self, context: ServerContext, request: CreateRequest, caller: Caller, root: str, notebook: str
    ) -> None:
        self._context = context
        self._request = request
        self._caller = caller
        self._root = root
        self.notebook = notebook

    async def commit(self, body: dict[str, Any], hidden: dict[str, Any]) -> None:
        request, store = self._request, self._context.store
        previous = request.previous_response_id
        stored = Stored(body["id"], self._caller.tenant, body, request.items, hidden, previous, self._root)
        stored.nameless = request.nameless
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
        if is_finished and not request.stores and self._caller.memory is not None:
            self._caller.memory.add(stored)

    async def used_container(self, container_id: str) -> None:
        await self._context.containers.remember(container_id, self._caller.tenant, self.notebook)

    async def compact(self) -> Compacted:
        return await compact_conversation(self._context, self._request, self._caller, self.history, self.conversation)
