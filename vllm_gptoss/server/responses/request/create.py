"""The body of POST /v1/responses, checked field by field.

The fields are openai-python's `ResponseCreate` plus the sampling fields that vLLM adds to it. Each one is honoured,
echoed where the API defines it as a label (`metadata`, `user`, …), or refused with a 400 that names it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from openai.types.responses.responses_client_event import ResponseCreate
from pydantic import BaseModel, PrivateAttr, ValidationError

from vllm_gptoss.server.harmony.messages import EFFORTS, Effort
from vllm_gptoss.server.harmony.tokens import VOCABULARY
from vllm_gptoss.server.http.bodies import fail_fast
from vllm_gptoss.server.responses import ids
from vllm_gptoss.server.responses.errors import ApiError, checked_object, not_found, unsupported
from vllm_gptoss.server.responses.request.items import Item, nameless, parse_input
from vllm_gptoss.server.responses.request.tool_params import (
    check_schema_size,
    check_tool_choice,
    parse_tools,
    strict_names,
)
from vllm_gptoss.server.responses.request.validation import check_model, from_validation

REFUSED: Mapping[str, str] = {
    "access_programs": "there are no access programs here; leave it out",
    "image": "gpt-oss reads text only",
    "moderation": "no moderation model is served; moderate in front of this server",
    "prompt": "this server has no prompt templates (GPTOSS_PROMPTS); send the text in `instructions` and `input`",
    "structured_outputs": "use `text.format`, or a `custom` tool with a grammar",
    "chat_template_kwargs": "gpt-oss prompts are not made by a chat template; use `reasoning` and `text`",
    "mm_processor_kwargs": "gpt-oss reads text only",
    "media_io_kwargs": "gpt-oss reads text only",
    "kv_transfer_params": "disaggregated serving is not wired into this endpoint",
    "ec_transfer_params": "disaggregated serving is not wired into this endpoint",
    "previous_input_messages": "send the history as items in `input`",
    "enable_response_messages": "raw Harmony messages are not returned",
    "watermarking": "no watermark is applied here",
    "async": "async tool calls are not supported",
}

METADATA_PAIRS, METADATA_KEY, METADATA_VALUE = 16, 64, 512
"""OpenAI's documented limits of `metadata`."""

MAX_STOP = 1_024
"""Characters of a stop string: they are looked for in every piece of the answer."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A prompt template with its variables filled in. `opening` precedes the conversation; responses repeat `echo`."""

    opening: list[Item]
    echo: dict[str, Any]


class CreateRequest(ResponseCreate):
    """A checked request. `input` and `tools` hold plain dicts, each already checked against its own type."""

    type: Literal["response.create"] = "response.create"
    input: Any = None
    tools: Any = None
    tool_choice: Any = None
    client_metadata: dict[str, Any] | None = None  # Codex labels its requests with it
    # vLLM's sampling fields
    include_reasoning: bool = True
    request_id: str | None = None
    session_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    _strict_tools: frozenset[str] = PrivateAttr(default=frozenset())
    _nameless: frozenset[str] = PrivateAttr(default=frozenset())
    _filled: Filled | None = PrivateAttr(default=None)

    @property
    def filled(self) -> Filled | None:
        """The prompt template that the request named, its variables in place."""
        return self._filled

    @property
    def opening(self) -> list[Item]:
        """Items of the prompt template, which precede the conversation."""
        return self._filled.opening if self._filled else []

    @property
    def strict_tools(self) -> frozenset[str]:
        """Names of the functions with an explicit `strict: true`."""
        return self._strict_tools

    @property
    def items(self) -> list[dict[str, Any]]:
        """The request's own input items, a plain string as one user message."""
        return cast(list[dict[str, Any]], self.input or [])

    @property
    def nameless(self) -> frozenset[str]:
        """Generated ids of input items of a request that continues nothing; the store may replace them."""
        goes_on = self.previous_response_id or self.conversation_id
        return frozenset() if goes_on else self._nameless

    @property
    def tool_list(self) -> list[dict[str, Any]]:
        """The request's tools, each already checked."""
        return cast(list[dict[str, Any]], self.tools or [])

    @property
    def conversation_id(self) -> str | None:
        """The conversation that the request continues, given by id or as an object."""
        conversation = self.conversation
        return conversation.id if isinstance(conversation, BaseModel) else conversation

    @property
    def stops(self) -> list[str]:
        """The stop strings; the API takes one or a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def stores(self) -> bool:
        """Whether the response is stored: yes, unless `store` is false."""
        return self.store is not False

    @property
    def effort(self) -> Effort:
        """The trained effort nearest to `reasoning.effort`; medium if none is given."""
        return EFFORTS[(self.reasoning and self.reasoning.effort) or "medium"]

    @property
    def includes(self) -> frozenset[str]:
        """`include` as a set."""
        return frozenset(self.include or ())


def plain(value: Any) -> Any:
    """A part of a request as JSON values, without what the client left out; other values as they are."""
    return value.to_dict() if isinstance(value, BaseModel) and hasattr(value, "to_dict") else value


def parse_create(body: Any, filled: Filled | None = None) -> CreateRequest:
    """A request from its JSON `body`. Raises `ApiError` naming the field that is wrong or cannot be honoured.

    `filled`: the prompt template that was taken out of the body.
    """
    body = dict(checked_object(body))
    for name, why in REFUSED.items():
        if body.pop(name, None):
            raise unsupported(name, why)
    raw_input, raw_tools, choice = body.pop("input", None), body.pop("tools", None), body.pop("tool_choice", None)
    try:
        request: CreateRequest = fail_fast(CreateRequest).validate_python(body, strict=True)
    except ValidationError as error:
        raise from_validation(error) from None
    check_model(request)
    request.input = parse_input(raw_input)
    request._nameless = nameless(raw_input, request.input)
    request._filled = filled
    request.tools = parse_tools(raw_tools)
    request._strict_tools = strict_names(raw_tools)
    request.tool_choice = check_tool_choice(choice, request.tools)
    _check_ids(request)
    _check_combinations(request)
    _check_numbers(request)
    _check_details(request)
    check_metadata(request.metadata)
    if request.text and request.text.format:
        check_schema_size(plain(request.text.format).get("schema"), "text.format.schema")
    return request


_COMPACTED = frozenset(
    {
        "model",
        "input",
        "instructions",
        "previous_response_id",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
    }
)
"""Fields of POST /v1/responses/compact."""


def parse_compact(body: Any) -> CreateRequest:
    """The body of POST /v1/responses/compact as a request that stores nothing. Raises `ApiError`."""
    if not checked_object(body, _COMPACTED).get("model"):
        raise ApiError("Missing required parameter: 'model'.", param="model", code="missing_required_parameter")
    return parse_create({**body, "store": False})


def parse_count(body: Any, filled: Filled | None = None) -> CreateRequest:
    """The body of POST /v1/responses/input_tokens. `personality` is a label there. Raises `ApiError`."""
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name != "personality"}
    return parse_create(body, filled)


def _check_ids(request: CreateRequest) -> None:
    """Refuses strings that cannot be ids before a query: PostgreSQL rejects some of them."""
    if (previous := request.previous_response_id) and not ids.is_one(previous):
        message = f"Previous response with id '{previous[:128]}' not found."
        raise ApiError(message, param="previous_response_id", code="previous_response_not_found")
    if (conversation := request.conversation_id) and not ids.is_one(conversation):
        raise not_found("Conversation", conversation[:128], "conversation")


def _check_combinations(request: CreateRequest) -> None:
    if request.background and request.store is False:
        raise ApiError("'background' needs 'store' to be true.", param="background")
    if request.previous_response_id and request.conversation_id:
        message = "'previous_response_id' cannot be used together with 'conversation'."
        raise ApiError(message, param="previous_response_id", code="mutually_exclusive_parameters")
    if request.stream_options and not request.stream:
        raise ApiError("'stream_options' needs 'stream' to be true.", param="stream_options")
    if request.top_logprobs and "message.output_text.logprobs" not in request.includes:
        raise ApiError("'top_logprobs' needs 'message.output_text.logprobs' in 'include'.", param="top_logprobs")
    if "web_search_call.results" in request.includes:
        raise unsupported(
            "include", "'web_search_call.results' has no typed form; use 'web_search_call.action.sources'"
        )
    if request.skip_special_tokens is False:
        raise unsupported("skip_special_tokens", "Harmony's control tokens are read by the server")


_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_logprobs": (0, 20),
    "max_output_tokens": (1, 2**63 - 1),
    "max_tool_calls": (0, 2**63 - 1),
    "top_k": (-1, 2**63 - 1),
    "min_p": (0, 1),
    "min_tokens": (0, 2**63 - 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (-(2**63), 2**63 - 1),
    "priority": (-(2**63), 2**63 - 1),
}


_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")


def _check_numbers(request: CreateRequest) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(request, name)
        if value is not None and not low <= value <= high:  # NaN fails both
            message = f"Invalid value for '{name}': {value} is not between {low} and {high}."
            raise ApiError(message, param=name, code="invalid_value")
    if request.repetition_penalty is not None and not request.repetition_penalty > 0:
        raise ApiError("'repetition_penalty' must be above 0.", param="repetition_penalty")
    if request.request_id is not None and not _ID.fullmatch(request.request_id):
        message = "'request_id' is letters, digits, '_' and '-', at most 100."
        raise ApiError(message, param="request_id", code="invalid_value")
    _check_stops(request.stops)
    if request.cache_salt == "":
        raise ApiError("'cache_salt' must not be empty.", param="cache_salt")
    for index, token in enumerate(request.stop_token_ids or ()):
        if not 0 <= token < VOCABULARY:
            raise ApiError(f"Token ids are from 0 to {VOCABULARY - 1}.", param=f"stop_token_ids[{index}]")
    for key in request.logit_bias or ():
        if not (key.isascii() and key.isdigit() and len(key) < 7 and int(key) < VOCABULARY):
            raise ApiError(f"Keys of 'logit_bias' are token ids up to {VOCABULARY - 1}.", param=f"logit_bias.{key}")


def _check_stops(stops: Sequence[str]) -> None:
    most = int(os.environ.get("VLLM_MAX_STOP_STRINGS", "4"))
    if len(stops) > most:
        message = f"There are at most {most} stop strings (the server's VLLM_MAX_STOP_STRINGS)."
        raise ApiError(message, param="stop", code="invalid_value")
    if not all(0 < len(stop) <= MAX_STOP for stop in stops):
        raise ApiError(f"A stop string has 1 to {MAX_STOP} characters.", param="stop", code="invalid_value")


def _check_details(request: CreateRequest) -> None:
    if reasoning := request.reasoning:
        if reasoning.mode not in (None, "standard"):
            raise unsupported("reasoning.mode", "only 'standard' exists here")
        if reasoning.context == "all_turns":
            raise unsupported("reasoning.context", "gpt-oss is trained to forget reasoning before the last answer")
    if cache := request.prompt_cache_options:
        if cache.mode == "explicit":
            raise unsupported("prompt_cache_options.mode", "prefixes are always cached implicitly")
        if cache.prewarm:
            raise unsupported("prompt_cache_options.prewarm", "send 'generate': false over the WebSocket instead")
        if cache.comparison_response_id:
            raise unsupported("prompt_cache_options.comparison_response_id", "there are no cache diagnostics")
        if cache.ttl == "12h":
            raise unsupported("prompt_cache_options.ttl", "cached prefixes live until memory is needed")
    if request.prompt_cache_retention == "24h":
        raise unsupported("prompt_cache_retention", "cached prefixes live in memory")
    for index, entry in enumerate(request.context_management or ()):
        if entry.type != "compaction":
            raise unsupported(f"context_management[{index}].type", "only 'compaction' exists")


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """OpenAI's limits of `metadata`. Raises `ApiError` naming the pair."""
    if metadata is None:
        return
    if len(metadata) > METADATA_PAIRS:
        raise ApiError(f"'metadata' has more than {METADATA_PAIRS} pairs.", param="metadata")
    for key, value in metadata.items():
        if len(key) > METADATA_KEY or len(value) > METADATA_VALUE:
            message = f"Keys of 'metadata' have at most {METADATA_KEY} characters, values {METADATA_VALUE}."
            raise ApiError(message, param=f"metadata.{key[:METADATA_KEY]}")
