"""The response object and its usage."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from vllm_gptoss.server.responses.request.create import CreateRequest, plain
from vllm_gptoss.server.responses.request.items import Item, message_item


@dataclass(slots=True)
class Usage:
    """Tokens, each counted once: `input`: the prompt and answers of tools; `output`: all generated tokens."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(operator.add, astuple(self), astuple(other)))

    def fields(self) -> dict[str, Any]:
        """`usage` of a response."""
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": min(self.cached, self.input), "cache_write_tokens": 0},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


def new_response(
    request: CreateRequest, identifier: str, model: str, defaults: Mapping[str, Any], status: str = "in_progress"
) -> dict[str, Any]:
    """The response before anything was generated. Keys follow the API reference; absent values are null."""
    reasoning, text = plain(request.reasoning) or {}, plain(request.text) or {}
    summary = reasoning.get("summary") or reasoning.get("generate_summary")
    conversation = request.conversation_id
    return {
        "id": identifier,
        "object": "response",
        "access_programs": None,
        "created_at": int(time.time()),
        "completed_at": None,
        "status": status,
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": _instructions(request),
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning.get("effort") or request.effort.value, "summary": summary},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.stores,
        "temperature": _number(request.temperature, defaults, "temperature", 1.0),
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity") or "medium"},
        "tool_choice": request.tool_choice,
        "tools": [_shown(tool) for tool in request.tool_list],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": _number(request.top_p, defaults, "top_p", 1.0),
        "presence_penalty": _number(request.presence_penalty, defaults, "presence_penalty", 0.0),
        "frequency_penalty": _number(request.frequency_penalty, defaults, "frequency_penalty", 0.0),
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
        "metadata": dict(request.metadata or {}),
        **({"conversation": {"id": conversation}} if conversation else {}),
        **({"prompt": request.filled.echo} if request.filled else {}),
    }


def _instructions(request: CreateRequest) -> str | list[Item] | None:
    """`instructions`: a list if a template has messages, as in OpenAI's API."""
    if not request.opening:
        return request.instructions
    first = [message_item("developer", request.instructions)] if request.instructions else []
    return [_as_sent(item) for item in (*first, *request.opening)]


def _as_sent(item: Item) -> Item:
    """Input messages have no id in the API; assistant messages have one."""
    return item if item["role"] == "assistant" else {key: value for key, value in item.items() if key != "id"}


def _number(given: float | None, defaults: Mapping[str, Any], name: str, otherwise: float) -> float:
    if given is not None:
        return given
    value = defaults.get(name)
    return float(value) if value is not None else otherwise


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    """Secrets of a tool are not repeated, and so not stored."""
    if tool["type"] != "mcp":
        return tool
    return {name: value for name, value in tool.items() if name not in ("authorization", "headers")}
