"""Converts the messages of a chat completion request to a Harmony conversation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm_gptoss.server.harmony import messages as harmony
from vllm_gptoss.server.harmony.custom import arguments_of
from vllm_gptoss.server.harmony.events import Channel
from vllm_gptoss.server.harmony.messages import (
    EFFORTS,
    FUNCTIONS,
    Conversation,
    Effort,
    Message,
    ResponseFormat,
    ToolSpec,
)
from vllm_gptoss.tools.unreadable import describe

logger = logging.getLogger(__name__)

MAX_NAME = 256
"""Bytes of a tool's name: half of the maximal header."""

_LAST = "\0"  # key of the latest call, which no client's id equals
_warned: set[str] = set()


class ChatInputError(ValueError):
    """A message that cannot be rendered; `param` names it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def effort_of(value: str | None) -> Effort:
    """The nearest trained effort; medium if unset.

    Raises:
        ChatInputError: unknown effort.
    """
    if value is None:
        return Effort.MEDIUM
    if value not in EFFORTS:
        known = ", ".join(EFFORTS)
        raise ChatInputError(f"reasoning_effort={value!r} is not one of {known}", "reasoning_effort")
    effort = EFFORTS[value]
    if value != effort.value and value not in _warned:
        _warned.add(value)
        logger.warning("gpt-oss has no reasoning effort %r; %r is used (logged once).", value, effort.value)
    return effort


def conversation(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[ToolSpec] = (),
    effort: str | None = None,
    date: str | None = None,
    response_format: ResponseFormat | None = None,
    identity: str = harmony.IDENTITY,
    continues: bool = False,
    raw: frozenset[str] = frozenset(),
) -> Conversation:
    """The conversation of a chat request. `messages` are dicts as the API has them.

    raw: recipients that take text without JSON

    The first message, if it is of role system or developer, becomes the developer message's instructions.

    Raises:
        ChatInputError: a role, content part, tool result or tool name is invalid.
    """
    if not messages:
        raise ChatInputError("at least one message is needed", "messages")
    for index, tool in enumerate(tools):
        check_name(tool.name, f"tools[{index}].function.name")
    rest = list(enumerate(messages))
    instructions = None
    if rest and rest[0][1].get("role") in ("system", "developer"):
        instructions = _text(rest[0][1], 0) or None
        rest = rest[1:]
    history: list[Message] = []
    names: dict[str, str] = {}
    for index, message in rest:
        history.extend(_messages(message, index, names, raw))
    if continues and not (history and history[-1].channel is Channel.FINAL):
        raise ChatInputError("the last message must be an assistant's answer", "continue_final_message")
    return Conversation(
        harmony.System(date, effort_of(effort), identity=identity),
        harmony.Developer(instructions, (harmony.functions(tools),) if tools else (), response_format),
        history,
        continues,
    )


def check_name(name: str, param: str) -> None:
    """Rejects names that the parser could not read back from a header; a header's words end at blanks."""
    has_blanks = any(not character.isprintable() or character.isspace() for character in name)
    if not name or len(name.encode("utf-8", "replace")) > MAX_NAME or "<|" in name or has_blanks:
        raise ChatInputError(
            f"The tool's name {name[:80]!r} cannot be called: give 1 to {MAX_NAME} bytes without blanks, control"
            " characters and '<|'.",
            param,
        )


def _messages(message: Mapping[str, Any], index: int, names: dict[str, str], raw: frozenset[str]) -> Iterable[Message]:
    role = message.get("role")
    if role == "user":
        yield harmony.user(_text(message, index))
    elif role in ("system", "developer"):
        yield harmony.developer(_text(message, index))
    elif role == "tool":
        yield harmony.tool_result(f"{FUNCTIONS}.{_tool_name(message, index, names)}", _text(message, index))
    elif role == "assistant":
        yield from _assistant(message, index, names, raw)
    else:
        raise ChatInputError(
            f"role {role!r} is not one of system, developer, user, assistant, tool", f"messages[{index}].role"
        )


def _assistant(message: Mapping[str, Any], index: int, names: dict[str, str], raw: frozenset[str]) -> Iterable[Message]:
    """Reasoning, then text, then the calls: the order in which the model writes them."""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str):
        yield harmony.analysis(reasoning)
    calls = list(message.get("tool_calls") or ())
    if text := _text(message, index):
        yield harmony.preamble(text) if calls else harmony.final(text)
    for number, call in enumerate(calls):
        custom = call.get("custom")
        function = custom or call.get("function") or {}
        if not (name := function.get("name")):
            raise ChatInputError("a tool call needs a function name", f"messages[{index}].tool_calls[{number}]")
        names[call.get("id") or _LAST] = names[_LAST] = name
        recipient = f"{FUNCTIONS}.{name}"
        given = function.get("input" if custom else "arguments") or ""
        if recipient in raw:
            yield harmony.call(recipient, given, content_type=None)
        else:
            yield harmony.call(recipient, arguments_of(given) if custom else given)


def _tool_name(message: Mapping[str, Any], index: int, names: Mapping[str, str]) -> str:
    """The tool of a result: by call id, by name, or that of the last call, as in the checkpoint's template."""
    name = names.get(message.get("tool_call_id") or "") or message.get("name") or names.get(_LAST)
    if not name:
        raise ChatInputError(
            "a tool message needs a tool_call_id of an earlier assistant message", f"messages[{index}].tool_call_id"
        )
    return str(name)


def _text(message: Mapping[str, Any], index: int) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[str] = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            parts.append(part)
            continue
        kind = part.get("type", "text")
        text = _found(part) if kind == "tool_reference" else part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str) and message.get("role") == "tool":
            text = ("\n" if parts else "") + describe(part)
        if not isinstance(text, str):
            raise ChatInputError(
                f"gpt-oss reads text only, not a part of type {kind!r}", f"messages[{index}].content[{number}]"
            )
        parts.append(text)
    return "".join(parts)


def _found(part: Mapping[str, Any]) -> str | None:
    """Text for a `tool_reference` block; the definition of the tool is in the request."""
    name = part.get("name")
    return f"The tool {name} can be called now.\n" if isinstance(name, str) else None
