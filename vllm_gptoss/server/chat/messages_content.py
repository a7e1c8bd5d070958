"""Converts content blocks of /v1/messages that vLLM does not read to text: documents, search and tool results."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from vllm_gptoss.tools.documents import MAX_PDFS, MAX_TEXT, DocumentError, pdf_text
from vllm_gptoss.tools.protocol import CALLER
from vllm_gptoss.tools.unreadable import describe


def known_blocks(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """`body` with documents and search results as blocks that vLLM's request model accepts.

    A document becomes a `text` block that keeps its `source`, for `ContentReader`.

    Raises:
        ValueError: a tool that only Anthropic's servers run.
    """
    for tool in body["tools"] if isinstance(body.get("tools"), list) else ():
        if isinstance(tool, dict) and "input_schema" not in tool and tool.get("type") not in (None, "custom"):
            raise ValueError(
                f"tools of type {str(tool['type'])[:80]!r} do not run here; offer one with an input_schema"
            )
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body
    return {**body, "messages": [_known(message) for message in messages]}


def _known(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    return {**message, "content": [_known_block(block) for block in content]} if isinstance(content, list) else message


def _known_block(block: Any) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "document":
        return {"type": "text", "text": str(block.get("title") or "unnamed"), "source": block.get("source") or {}}
    return {"type": "text", "text": _search_result(block)} if kind == "search_result" else block


def _search_result(block: Mapping[str, Any]) -> str:
    return f"[{block.get('title')}: {block.get('source')}]\n{_joined(block.get('content'))}\n"


class ContentReader:
    """Reads the content of one request. PDF files are parsed in workers, as jobs of `CALLER`."""

    def __init__(self) -> None:
        self._pdfs = 0

    async def read(self, request: Any) -> str | None:
        """Replaces documents and tool results by text, in place. Returns why that is impossible, or None."""
        for at, message in enumerate(request.messages):
            for index, block in enumerate(() if isinstance(message.content, str) else message.content):
                if block.type == "image":
                    return f"messages.{at}.content.{index}: gpt-oss reads text only, no images."
                if block.type == "text" and block.source is not None:
                    try:
                        block.text = await self._document(block.source, block.text)
                    except DocumentError as error:
                        return f"messages.{at}.content.{index}: {error}."
                    block.source = None
                elif block.type == "tool_result" and isinstance(block.content, list):
                    block.content = [await self._result(part) for part in block.content]
        return None

    async def _result(self, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in (None, "text", "tool_reference"):
            return part
        if kind == "search_result":
            return {"type": "text", "text": _search_result(part)}
        try:
            if kind != "document":
                raise DocumentError("only documents have text")
            return {"type": "text", "text": await self._document(part.get("source"), part.get("title"))}
        except DocumentError:
            return {"type": "text", "text": describe(part)}

    async def _document(self, source: Any, title: Any) -> str:
        name = str(title or "unnamed")
        fields: dict[str, Any] = source if isinstance(source, dict) else {}
        kind, media, data = fields.get("type"), str(fields.get("media_type")), fields.get("data")
        if kind == "content":
            text = _joined(fields.get("content"))
        elif kind == "text" and isinstance(data, str):
            text = data
        elif kind == "base64" and isinstance(data, str) and media == "application/pdf":
            self._pdfs += 1
            if self._pdfs > MAX_PDFS:
                raise DocumentError(f"a request may have {MAX_PDFS} PDF files")
            return await pdf_text(data, name, CALLER.get())
        elif kind == "base64" and isinstance(data, str) and media.startswith("text/"):
            text = _decoded(data)
        else:
            raise DocumentError("only documents with a source of type text, content, or base64 of a PDF can be read")
        if len(text) > MAX_TEXT:
            raise DocumentError(f"the text of a file is at most {MAX_TEXT} characters")
        return f"[file: {name}]\n{text}\n"


def _decoded(data: str) -> str:
    try:
        return base64.b64decode(data, validate=True).decode()
    except ValueError:
        raise DocumentError("only base64 of UTF-8 text can be read") from None


def _joined(content: Any) -> str:
    """The text of `content`, a string or a list of blocks; other blocks are described."""
    if isinstance(content, str):
        return content
    blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    return "\n".join(block["text"] if isinstance(block.get("text"), str) else describe(block) for block in blocks)
