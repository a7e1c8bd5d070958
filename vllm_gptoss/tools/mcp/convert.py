"""An MCP result as the content of the tool contract: all blocks in order, bounded, never an exception."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import mcp_types as types

from vllm_gptoss.tools.protocol import Content, Image, Text, ToolError, ToolResult
from vllm_gptoss.tools.unreadable import describe

MAX_IMAGE_BYTES = 10_000_000
MAX_IMAGES = 16


def to_result(result: types.CallToolResult, max_chars: int) -> ToolResult:
    """`result` for the model and the client; text beyond `max_chars` is cut with a note."""
    content = list(_bounded(_contents(result), max_chars))
    error = None
    if result.is_error:
        text = "\n".join(part.text for part in content if isinstance(part, Text))
        error = ToolError("tool_failed", text or "the tool reported an error without a message")
    if not content:
        content = [Text("(the tool returned no output)")]
    return ToolResult(content, error=error, structured=result.structured_content)


def _contents(result: types.CallToolResult) -> Iterator[Content]:
    for block in result.content:
        yield from _block(block)
    if not result.content and result.structured_content is not None:
        yield Text(json.dumps(result.structured_content, ensure_ascii=False))


def _block(block: Any) -> Iterator[Content]:
    match block:
        case types.TextContent():
            if block.text:
                yield Text(block.text)
        case types.ImageContent():
            yield _image(block)
        case types.AudioContent():
            yield Text(describe({"type": "audio", "mimeType": block.mime_type, "data": block.data}))
        case types.ResourceLink():
            yield Text(f"[resource {block.name}: {block.uri}]")
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            yield Text(resource.text)
        case types.EmbeddedResource():
            yield Text(f"[binary resource {block.resource.uri}, {block.resource.mime_type or 'unknown type'}]")
        case _:
            yield Text(describe({"type": getattr(block, "type", "unknown")}))


def _image(block: types.ImageContent) -> Content:
    if len(block.data) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        return Text(f"[image, {block.mime_type}: left out, larger than {MAX_IMAGE_BYTES} bytes]")
    try:
        data = base64.b64decode(block.data, validate=True)
    except ValueError:
        return Text(f"[image, {block.mime_type}: left out, its data is not base64]")
    return Image(block.mime_type, data, alt=f"[image, {block.mime_type}]")


def _bounded(contents: Iterator[Content], max_chars: int) -> Iterator[Content]:
    used = images = left_out = 0
    for part in contents:
        if isinstance(part, Image):
            images += 1
            if images <= MAX_IMAGES:
                yield part
            continue
        if isinstance(part, Text):
            room = max_chars - used
            used += len(part.text)
            if len(part.text) > room:
                left_out += len(part.text) - max(room, 0)
                part = Text(part.text[: max(room, 0)])
            if part.text:
                yield part
    if left_out:
        yield Text(f"[output truncated: {left_out} of {used} characters left out]")
    if images > MAX_IMAGES:
        yield Text(f"[{images - MAX_IMAGES} more images left out]")
