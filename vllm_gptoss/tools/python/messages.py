"""A kernel's messages, reduced to what is used of them. The program can forge any: nothing here believes a shape.

Small ones are read where they arrive, large ones in a confined worker; both ways end in the same `KernelMessage`.
Protocol: jupyter-client.readthedocs.io/en/stable/messaging.html, version 5.4.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_gptoss.tools.confined.jobs import Refused, job

IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml")
TEXT_TYPES = ("text/plain", "text/markdown", "text/latex", "application/json", "text/html")
DISPLAYS = ("display_data", "execute_result", "update_display_data")

_DELIMITER = b"<IDS|MSG>"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_INT = 1 << 64  # the text of an int of a million digits takes minutes, or is an error
_NAME, _VALUE, _PLAIN = 200, 2000, 200  # characters of an error's name and text, and of an image's description

Content = dict[str, str | int | bool | dict[str, str]]


class MalformedError(Refused):
    """The bytes are not a message of the kernel's protocol."""


@dataclass(slots=True)
class KernelMessage:
    """`kind` is the message's type, `parent` the id of the request that it belongs to.

    `content` by kind: a text with its `length` before it was cut (`stream`, `error`, displays), an `image` in base64 or
    as SVG with its `media_type` and `plain` description, `ename` and `evalue`, `state`, `wait`, `exits`.
    """

    kind: str
    parent: str
    content: Content = field(default_factory=dict)


def read(frames: Sequence[bytes], key: bytes, keep: int) -> KernelMessage:
    """The signed message in `frames`; of texts, `keep` characters of either end remain. Raises MalformedError."""
    try:
        start = list(frames).index(_DELIMITER) + 1
        signature, *parts = frames[start : start + 5]
        header, parent, _, content = parts
    except ValueError:
        raise MalformedError("no message") from None
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(part)
    if not hmac.compare_digest(digest.hexdigest().encode(), signature):
        raise MalformedError("not signed")
    kind = _object(header).get("msg_type")
    origin = _object(parent).get("msg_id", "")
    if not isinstance(kind, str) or not isinstance(origin, str):
        raise MalformedError("no type")
    return reduced(kind, origin, _object(content), keep)


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise MalformedError("not JSON") from None
    if not isinstance(value, dict):
        raise MalformedError("not an object")
    return value


def reduced(kind: str, parent: str, body: Mapping[str, Any], keep: int) -> KernelMessage:
    message = KernelMessage(kind, parent)
    if kind == "stream":
        message.content = _cut(_text(body.get("text")), keep)
    elif kind in DISPLAYS:
        data = body.get("data")
        message.content = _bundle(data if isinstance(data, dict) else {}, keep)
    elif kind == "error":
        lines = body.get("traceback")
        text = "\n".join(map(_text, lines if isinstance(lines, list) else [])) + "\n"
        message.content = {**_cut(text, keep), **_names(body)}
    elif kind == "status":
        message.content = {"state": _text(body.get("execution_state"))[:_NAME]}
    elif kind == "clear_output":
        message.content = {"wait": bool(body.get("wait"))}
    elif kind in ("execute_reply", "reply"):
        payload = body.get("payload")
        asked = [p.get("source") for p in payload if isinstance(p, dict)] if isinstance(payload, list) else []
        message.content = {"exits": "ask_exit" in asked, "failed": body.get("status") == "error", **_names(body)}
    return message


def _text(value: object) -> str:
    """A string's own text; of anything else only a short one, since a tree's would be larger than the tree."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()  # no lone surrogates
    return str(value)[:_VALUE] if isinstance(value, float) or (isinstance(value, int) and abs(value) < _INT) else ""


def _names(body: Mapping[str, Any]) -> Content:
    return {"ename": _text(body.get("ename"))[:_NAME], "evalue": _text(body.get("evalue"))[:_VALUE]}


def _cut(text: str, keep: int) -> Content:
    text = _ANSI.sub("", text)
    return {"text": text if len(text) <= 2 * keep else text[:keep] + text[-keep:], "length": len(text)}


def _bundle(data: Mapping[str, Any], keep: int) -> Content:
    for media_type in IMAGE_TYPES:
        if media_type in data:
            plain = _text(data.get("text/plain"))[:_PLAIN]
            return {"media_type": media_type, "image": _text(data[media_type]), "plain": plain}
    for media_type in TEXT_TYPES:
        if media_type in data:
            value = data[media_type]
            text = value if isinstance(value, str) else json.dumps(value)
            return _cut(f"{text}\n", keep)
    return {}


@job
def read_message(payload: bytes, *, key: bytes, keep: int) -> KernelMessage:
    return read(msgspec.msgpack.decode(payload, type=list[bytes]), key, keep)


@job
def read_pair(data: bytes, keep: int) -> KernelMessage:
    """The portable notebook's frame: a JSON array of kind and body. Raises MalformedError."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise MalformedError("not JSON") from None
    match value:
        case [str() as kind, {"id": str() as parent, "content": dict() as body}]:
            return reduced(kind, parent, body, keep)
        case [str() as kind, dict() as body]:
            return reduced(kind, "", body, keep)
    raise MalformedError("not a frame")
