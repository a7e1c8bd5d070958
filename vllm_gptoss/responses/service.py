"""What the routes call: makes a job of a request and runs it, in the foreground or in the background."""

from __future__ import annotations

import datetime
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from vllm_gptoss.harmony import messages as harmony
from vllm_gptoss.harmony.messages import Conversation
from vllm_gptoss.harmony.prompt import render, render_message
from vllm_gptoss.responses import ids, resource
from vllm_gptoss.responses.config import ResponsesConfig
from vllm_gptoss.responses.constraint import structural_tag
from vllm_gptoss.responses.engine import Engine, Sampling
from vllm_gptoss.responses.errors import ApiError, not_found
from vllm_gptoss.responses.events import TERMINAL, Event
from vllm_gptoss.responses.history import History, Reader, drop_oldest
from vllm_gptoss.responses.job import Compacted, Job
from vllm_gptoss.responses.loop import Loop
from vllm_gptoss.responses.past import Caller, ConversationHold, Past, past_of
from vllm_gptoss.responses.preamble import extra_words, response_format
from vllm_gptoss.responses.request import CreateRequest
from vllm_gptoss.responses.sealing import Sealer
from vllm_gptoss.responses.store import Store, Stored
from vllm_gptoss.responses.tool_params import WEB_SEARCH
from vllm_gptoss.responses.toolset import Opener, Providers, Toolset
from vllm_gptoss.responses.writers import Style
from vllm_gptoss.tools.base import ToolKind

logger = logging.getLogger(__name__)

Models = Callable[[str | None], tuple[str, Any]]
"""From the `model` of a request to the name to answer with and its LoRA adapter; raises `ApiError` if unknown."""

CONTAINERS = 100_000
"""Containers whose owner is remembered; the python tool forgets their files sooner."""

COMPACT_AT = 0.8
"""Share of the context window at which `context_management` compacts when the request names no threshold."""

TRUNCATION_RESERVE = 1024
"""Tokens that `truncation: auto` leaves for the answer when the request names no `max_output_tokens`."""


class Service:
    """The Responses API without HTTP."""

    def __init__(
        self,
        engine: Engine,
        models: Models,
        config: ResponsesConfig,
        providers: Providers,
        store: Store | None,
        sealer: Sealer,
    ) -> None:
        self.engine = engine
        self.config = config
        self.providers = providers
        self.store = store
        self.sealer = sealer
        self.models = models
        self._told_search = False
        self._containers: OrderedDict[str, tuple[str, str]] = OrderedDict()

    # Creating

    async def prepare(
        self, request: CreateRequest, caller: Caller, *, queued: bool = False, holds: bool = True
    ) -> Loop:
        """Checks everything that can be checked before the first token, so that errors are HTTP errors.

        `holds`: a conversation is kept from other responses until the loop has run or is closed.
        """
        identifier = request.request_id or ids.new("resp")
        hold = None
        if request.conversation_id and holds:
            store = self.need_store("conversation")
            hold = ConversationHold(store, caller.tenant, request.conversation_id, identifier)
            await hold.take()
        try:
            return Loop(await self._job(request, caller, identifier, queued), hold)
        except BaseException:
            if hold:
                await hold.release()
            raise

    async def _job(self, request: CreateRequest, caller: Caller, identifier: str, queued: bool) -> Job:
        name, lora = self.models(request.model)
        if request.request_id and self.store and await self.store.exists(identifier):
            raise ApiError(f"The id '{identifier}' is taken.", param="request_id", code="invalid_value")
        if request.stores and self.store is None and request.store:
            raise ApiError("This server stores nothing; send 'store': false.", param="store", code="store_disabled")
        past = await self.past(request, caller)
        root = past.root or identifier
        if caller.adds_search:
            self._leave_out_search(request)
        keyed = f"{caller.tenant}:{request.conversation_id or root}"
        calls = list(past.hidden.values())
        opener = Opener(self.providers, identifier, keyed, lambda name: self._notebook(name, caller), calls)
        toolset = await opener.open(request.tool_list, request.tool_choice)
        try:
            history = self.read(request, past, caller, toolset)
            conversation = self.conversation(request, history, toolset)
            compact = self._compaction(request, caller, history, conversation)
            if compact is None:
                prompt, conversation = self._fit(request, conversation)
            else:
                prompt = render(conversation)
            body = resource.begin(
                request, identifier, name, self.engine.defaults, "queued" if queued else "in_progress"
            )
            return Job(
                body=body,
                conversation=conversation,
                prompt=prompt,
                engine=self.engine,
                sampling=self.sampling(request, toolset, caller, lora),
                toolset=toolset,
                style=self._style(request, caller, toolset),
                commit=self._committer(request, caller, past.root or identifier),
                budget=request.max_output_tokens,
                max_tool_calls=request.max_tool_calls,
                max_rounds=self.config.max_tool_rounds,
                stops=request.stops,
                min_tokens=request.min_tokens or 0,
                tool_timeout=self.config.tool_timeout,
                approvals=history.approvals,
                listed=frozenset(history.listed),
                queued=queued,
                compact=compact,
                only_compacts=history.wants_compaction,
                owns=lambda container_id: self._remember(container_id, caller.tenant, keyed),
            )
        except BaseException:
            await toolset.close()
            raise

    def _leave_out_search(self, request: CreateRequest) -> None:
        """A search that an agent offers by itself is no reason to refuse its user, if nobody has set up a browser."""
        provider = self.providers.of_kind(ToolKind.BROWSER)
        if provider is not None and not provider.unavailable:
            return
        kept = [tool for tool in request.tool_list if tool["type"] not in WEB_SEARCH]
        if len(kept) < len(request.tool_list):
            if not self._told_search:
                logger.warning("Codex offers web_search; this server has no browser (--tool-server), so it is left out")
            self._told_search = True
            request.tools = kept

    def _compaction(
        self, request: CreateRequest, caller: Caller, history: History, conversation: Conversation
    ) -> Callable[[], Awaitable[Compacted]] | None:
        """How to shorten the conversation first, if the request wants that or its threshold is passed."""
        from vllm_gptoss.responses.compaction import compact_conversation

        wanted = history.wants_compaction
        for entry in request.context_management or ():
            limit = entry.compact_threshold or int(self.engine.max_model_len * COMPACT_AT)
            wanted = wanted or len(render(conversation)) > limit
        if not wanted:
            return None
        if not history.messages:
            raise ApiError("There is nothing to compact.", param="input", code="missing_required_parameter")
        return lambda: compact_conversation(self, request, caller, history, conversation)

    def _remember(self, container_id: str, tenant: str, conversation: str) -> None:
        self._containers[container_id] = (tenant, conversation)
        while len(self._containers) > CONTAINERS:
            self._containers.popitem(last=False)

    def _notebook(self, container_id: str, caller: Caller) -> str:
        """The conversation whose notebook a request means by `container`: the one that used it, else a named one."""
        tenant, conversation = self._containers.get(container_id, ("", ""))
        return conversation if tenant == caller.tenant else f"{caller.tenant}:container:{container_id}"

    def owns(self, container_id: str, caller: Caller) -> bool:
        """Whether a tool of the caller's left files in this container."""
        return self._containers.get(container_id, ("", ""))[0] == caller.tenant

    async def past(self, request: CreateRequest, caller: Caller) -> Past:
        """The items before the request's own, from the response or conversation it goes on from."""
        if len(request.items) > self.config.max_input_items:
            raise ApiError(f"More than {self.config.max_input_items} items.", param="input")
        store = self.need_store("conversation") if request.conversation_id else self.store
        return await past_of(request, caller, store)

    def need_store(self, param: str) -> Store:
        if self.store is None:
            raise ApiError("This server stores nothing.", param=param, code="store_disabled")
        return self.store

    def read(self, request: CreateRequest, past: Past, caller: Caller, toolset: Toolset) -> History:
        def unseal(text: str, purpose: str) -> str | None:
            return self.sealer.open(text, tenant=caller.tenant, purpose=purpose)

        raw = frozenset(route.recipient for route in toolset.routes.values() if route.raw)
        reader = Reader(past.hidden, unseal, raw)
        return reader.read([*past.items, *request.items], own_from=len(past.items))

    def conversation(self, request: CreateRequest, history: History, toolset: Toolset) -> Conversation:
        """The prompt: the preamble is this request's own, whatever the turns before it had."""
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

    def _fit(self, request: CreateRequest, conversation: Conversation) -> tuple[list[int], Conversation]:
        prompt = render(conversation)
        limit = self.engine.max_model_len
        if len(prompt) < limit and request.truncation != "auto":
            return prompt, conversation
        if request.truncation == "auto":
            goal = limit - min(request.max_output_tokens or TRUNCATION_RESERVE, limit // 2)
            if len(prompt) <= goal:
                return prompt, conversation
            sizes = [len(render_message(message)) for message in conversation.messages]
            kept = drop_oldest(conversation.messages, sizes, goal - (len(prompt) - sum(sizes)))
            conversation = replace(conversation, messages=tuple(kept))
            prompt = render(conversation)
            logger.info("Truncated the conversation to its last %d messages, %d tokens", len(kept), len(prompt))
            if len(prompt) < limit:
                return prompt, conversation
        message = f"The input has {len(prompt)} tokens; the model's context window has {limit}."
        raise ApiError(message, param="input", code="context_length_exceeded")

    def sampling(self, request: CreateRequest, toolset: Toolset, caller: Caller, lora: Any) -> Sampling:
        options = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
        if request.logit_bias:
            options["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
        if request.vllm_xargs:
            options["extra_args"] = request.vllm_xargs
        wants_logprobs = "message.output_text.logprobs" in request.includes
        return Sampling(
            max_tokens=0,
            options=options,
            logprobs=(request.top_logprobs or 0) if wants_logprobs else None,
            structural_tag=structural_tag(request, toolset, strict_tools=self.config.strict_tools),
            priority=request.priority,
            cache_salt=request.cache_salt,
            session_id=request.session_id,
            trace_headers=caller.trace_headers,
            lora=lora,
        )

    def _style(self, request: CreateRequest, caller: Caller, toolset: Toolset) -> Style:
        includes = request.includes

        def seal(text: str) -> str:
            return self.sealer.seal(text, tenant=caller.tenant, purpose="reasoning")

        reasoning = request.reasoning
        return Style(
            reasoning=request.include_reasoning,
            summary=(reasoning.summary or reasoning.generate_summary) if reasoning else None,
            seal=seal if "reasoning.encrypted_content" in includes else None,
            logprobs="message.output_text.logprobs" in includes,
            outputs="code_interpreter_call.outputs" in includes,
            sources="web_search_call.action.sources" in includes,
            source=toolset.source,
        )

    def _committer(self, request: CreateRequest, caller: Caller, root: str) -> Any:
        async def commit(body: dict[str, Any], hidden: dict[str, Any]) -> None:
            stored = Stored(
                body["id"],
                caller.tenant,
                body,
                request.items,
                hidden,
                request.previous_response_id,
                root,
            )
            finished = body["status"] in ("completed", "incomplete")
            if request.stores and self.store:
                await self.store.save(stored, request.conversation_id if finished else None)
            elif request.conversation_id and self.store and finished:
                both = [(item, None) for item in stored.input]
                both += [(item, hidden.get(item["id"])) for item in body["output"]]
                await self.store.conversations.append(request.conversation_id, both)
            if finished and not request.stores:
                caller.memory[stored.id] = stored

        return commit

    # Reading back

    async def get(self, identifier: str, caller: Caller) -> Stored:
        stored = await self.store.get(caller.tenant, identifier) if self.store else None
        if stored is None:
            raise not_found("Response", identifier)
        return stored

    async def delete(self, identifier: str, caller: Caller) -> None:
        if not (self.store and await self.store.delete(caller.tenant, identifier)):
            raise not_found("Response", identifier)


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "seed",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
)


Batches = AsyncGenerator[list[Event], None]


async def last_body(batches: Batches) -> dict[str, Any]:
    """Drains a response's events; its final body."""
    body: dict[str, Any] = {}
    async with aclosing(batches):
        async for batch in batches:
            if batch and batch[-1]["type"] in TERMINAL:
                body = batch[-1]["response"]
    return body


__all__ = ["Batches", "Models", "Service", "last_body"]
