"""Content of a tool's answer that gpt-oss cannot read, described by a line of text in its place.

A client sends its history again on every turn: refusing an image in it would end the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_FACT = 200
"""Characters of a name or address in a description."""

_KINDS = ("image", "audio", "video", "document", "file")
_DATA = ("url", "image_url", "audio_url", "video_url", "file_url", "file_data", "data")
_MEDIA = ("media_type", "mimeType", "format")
_NAMES = ("filename", "title", "name", "uri", "file_id")


def describe(part: Mapping[str, Any]) -> str:
    """One line with kind, media type, size and name of `part`, as far as it has them. Never raises.

    part: a content part as OpenAI's chat and Responses APIs, Anthropic's API or MCP have it.
    """
    fields: dict[str, Any] = {}
    for inner in part.values():
        fields.update(inner if isinstance(inner, Mapping) else {})
    fields = {**fields, **{key: value for key, value in part.items() if not isinstance(value, Mapping)}}
    data, media = _text(fields, _DATA), _text(fields, _MEDIA)
    if data.startswith("data:"):
        head, _, data = data.partition(",")
        media = head[5:].partition(";")[0] or media
    is_link = data[:200].find("://") > 0
    size = f"{(len(data) - data[-2:].count('=')) * 3 // 4:,} bytes" if data and not is_link else ""
    kind = str(part.get("type"))
    kind = next((word for word in _KINDS if word in kind), f"content of type {kind}")
    facts = (kind, media, size, _text(fields, _NAMES), data if is_link else "")
    said = ", ".join(" ".join(fact[:MAX_FACT].split()) for fact in facts if fact)
    return f"[{said}: not shown, because this model reads text only]"


def _text(fields: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((value for name in names if isinstance(value := fields.get(name), str) and value), "")
