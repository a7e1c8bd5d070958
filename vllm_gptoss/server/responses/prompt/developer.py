"""Text of the developer message besides instructions and tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_gptoss.server.harmony.messages import ResponseFormat
from vllm_gptoss.server.responses.request.create import CreateRequest, plain

VERBOSITY: Mapping[str, str] = {
    "low": "Keep the final answer short: only what was asked for.",
    "high": "Make the final answer thorough: explain, and give details and examples.",
}
"""Text in the developer message for `text.verbosity`: gpt-oss has no such control."""


def extra_words(request: CreateRequest) -> list[str]:
    """Sentences for options without a place in Harmony: verbosity, and the user's location."""
    verbosity = request.text.verbosity if request.text else None
    return [VERBOSITY.get(verbosity or "", ""), _location(request.tool_list)]


def response_format(request: CreateRequest) -> ResponseFormat | None:
    """`text.format` as the prompt shows it."""
    form: dict[str, Any] = plain(request.text.format) if request.text and request.text.format else {}
    if not form:
        return None
    if form["type"] == "json_schema":
        return ResponseFormat(form["name"], form["schema"], form.get("description") or "")
    if form["type"] == "json_object":
        return ResponseFormat("json_object", {"type": "object"}, "Any JSON object.")
    return None


def _location(tools: Sequence[Mapping[str, Any]]) -> str:
    """`user_location` of a web search tool, in words for the model."""
    for tool in tools:
        place = tool.get("user_location") or {}
        parts = [place[name] for name in ("city", "region", "country") if place.get(name)]
        if place.get("timezone"):
            parts.append(f"time zone {place['timezone']}")
        if parts:
            return f"The user is near: {', '.join(parts)}."
    return ""
