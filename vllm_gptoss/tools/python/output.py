"""A cell's output messages as contents for the model: text in order, images with a description, all of it bounded."""

from __future__ import annotations

import base64
import struct

from vllm_gptoss.tools.protocol import Content, Image, Text

from .messages import DISPLAYS, KernelMessage

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

    def add(self, message: KernelMessage) -> None:
        kind, content = message.kind, message.content
        if kind == "clear_output":
            self._clear_next = bool(content["wait"])
            if not self._clear_next:
                self._parts.clear()
            return
        if (kind == "stream" or kind in DISPLAYS) and self._clear_next:
            self._parts.clear()
            self._clear_next = False
        if kind == "error":
            self.error = str(content["ename"]), str(content["evalue"])
        if "image" in content:
            self._image(str(content["media_type"]), str(content["image"]), str(content["plain"]))
        elif "text" in content:
            self._text(str(content["text"]), int(str(content["length"])))

    def _text(self, text: str, length: int = 0) -> None:
        if not self._parts or isinstance(self._parts[-1], Image):
            self._parts.append(_Printed(self._max_chars))
        last = self._parts[-1]
        if isinstance(last, _Printed):
            last.add(text, length or len(text))

    def _image(self, media_type: str, value: str, plain: str) -> None:
        try:
            raw = value.encode() if media_type == "image/svg+xml" else base64.b64decode(value)
        except ValueError:
            raw = b""
        if not raw:
            self._text("[image that could not be read]\n")
            return
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
    """Text in pieces, of which both ends remain: a flood costs its own length once, and `limit` in memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head = ""
        self._tail = ""
        self.length = 0

    def add(self, text: str, length: int) -> None:
        """`length`: of the text before its middle was dropped."""
        self.length += length
        room = self._limit - len(self._head)
        self._head += text[:room]
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
