"""A cell's output messages as contents for the model: text in order, images with a description, all of it bounded."""

from __future__ import annotations

import base64
import re
import struct
from typing import Any

from vllm_gptoss.tools.base import Content, Image, Text

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml")
_TEXT_TYPES = ("text/plain", "text/markdown", "text/latex", "application/json", "text/html")
_TAIL_SHARE = 4  # of a truncated text the last quarter stays: that is where a traceback names the error


class OutputCollector:
    """Collects the messages of one call; `contents` at its end."""

    def __init__(self, *, max_chars: int, max_images: int, max_image_bytes: int) -> None:
        self._max_chars = max_chars
        self._max_images = max_images
        self._max_image_bytes = max_image_bytes
        self._parts: list[_Printed | Image] = []
        self._images = 0
        self._clear_next = False
        self.error: tuple[str, str] | None = None

    def add(self, kind: str, body: dict[str, Any]) -> None:
        """Takes one iopub message. Raises on malformed content, which the caller drops."""
        if kind == "clear_output":
            self._clear_next = bool(body.get("wait"))
            if not self._clear_next:
                self._parts.clear()
            return
        if kind in ("stream", "display_data", "execute_result", "update_display_data") and self._clear_next:
            self._parts.clear()
            self._clear_next = False
        if kind == "stream":
            self._text(str(body["text"]))
        elif kind in ("display_data", "execute_result", "update_display_data"):
            self._bundle(body["data"])
        elif kind == "error":
            self.error = str(body["ename"])[:200], str(body["evalue"])[:2000]
            self._text("\n".join(str(line) for line in body["traceback"]) + "\n")

    def _text(self, text: str) -> None:
        text = _ANSI.sub("", text)
        if not self._parts or isinstance(self._parts[-1], Image):
            self._parts.append(_Printed(self._max_chars))
        last = self._parts[-1]
        if isinstance(last, _Printed):
            last.add(text)

    def _bundle(self, data: dict[str, Any]) -> None:
        for media_type in _IMAGE_TYPES:
            if media_type in data:
                self._image(media_type, data)
                return
        for media_type in _TEXT_TYPES:
            if media_type in data:
                self._text(str(data[media_type]) + "\n")
                return

    def _image(self, media_type: str, data: dict[str, Any]) -> None:
        value = data[media_type]
        try:
            raw = value.encode() if media_type == "image/svg+xml" else base64.b64decode(value)
        except (AttributeError, TypeError, ValueError):
            self._text("[image that could not be read]\n")
            return
        plain = str(data.get("text/plain", ""))[:200]
        if self._images >= self._max_images or len(raw) > self._max_image_bytes:
            self._text(f"[image dropped ({len(raw)} bytes): {plain}]\n")
            return
        self._images += 1
        size = _png_size(raw)
        described = f"{media_type}, {size}" if size else media_type
        self._parts.append(
            Image(media_type, raw, f"[image: {described}; {plain}]" if plain else f"[image: {described}]")
        )

    def contents(self) -> list[Content]:
        """What was collected, texts cut to the limit together."""
        left = self._max_chars
        result: list[Content] = []
        for part in self._parts:
            if isinstance(part, _Printed):
                text = part.cut(left)
                left = max(0, left - part.length)
                if text:
                    result.append(Text(text))
            else:
                result.append(part)
        return result


class _Printed:
    """Text in pieces, of which both ends are kept: a flood costs its own length once, and `limit` in memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head = ""
        self._tail = ""
        self.length = 0

    def add(self, text: str) -> None:
        self.length += len(text)
        room = self._limit - len(self._head)
        self._head += text[:room]
        if len(text) > room:
            self._tail = (self._tail + text[room:])[-self._limit :]

    def cut(self, limit: int) -> str:
        """At most about `limit` characters (no more than the limit it was made with), with a note of how much is
        missing."""
        if self.length <= limit:
            return self._head + self._tail
        tail = limit // _TAIL_SHARE
        note = f"\n[… {self.length - limit} characters omitted …]\n"
        return self._head[: limit - tail] + note + ((self._head + self._tail)[-tail:] if tail else "")


def _png_size(raw: bytes) -> str:
    if raw[:8] != b"\x89PNG\r\n\x1a\n" or len(raw) < 24:
        return ""
    width, height = struct.unpack(">II", raw[16:24])
    return f"{width}x{height}"
