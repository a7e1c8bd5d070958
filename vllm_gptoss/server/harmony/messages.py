"""The parts of a prompt, which request readers build and `prompt.render` renders.

Sources: OpenAI's "Harmony response format" (openai/harmony docs/format.md) and the chat template in the gpt-oss
checkpoints. Everything here is a value: no tokens, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vllm_gptoss.server.harmony.events import Channel

FUNCTIONS = "functions"
"""The namespace of a request's own function tools."""

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
KNOWLEDGE_CUTOFF = "2024-06"


class Role(StrEnum):
    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Effort(StrEnum):
    """The three efforts the models were trained with."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


EFFORTS: Mapping[str, Effort] = {
    "none": Effort.LOW,
    "minimal": Effort.LOW,
    "low": Effort.LOW,
    "medium": Effort.MEDIUM,
    "high": Effort.HIGH,
    "xhigh": Effort.HIGH,
    "max": Effort.HIGH,
}
"""The APIs' efforts, mapped to the nearest of the three. gpt-oss always reasons."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One callable. `parameters` is a JSON schema of type object; None or one without properties means no arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolNamespace:
    """Tools that share a prefix. Without `tools` the namespace is itself the tool (`to=python`) and takes free text."""

    name: str
    description: str = ""
    tools: Sequence[ToolSpec] = ()


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A JSON schema that the final answer must follow."""

    name: str
    schema: Mapping[str, Any]
    description: str = ""


@dataclass(frozen=True, slots=True)
class System:
    """The system message. `date` is YYYY-MM-DD or None for no date line; `tools` are built in, called on analysis."""

    date: str | None = None
    effort: Effort = Effort.MEDIUM
    tools: Sequence[ToolNamespace] = ()
    identity: str = IDENTITY
    knowledge_cutoff: str | None = KNOWLEDGE_CUTOFF


@dataclass(frozen=True, slots=True)
class Developer:
    """The developer message: what an API calls the system prompt, and the tools called on commentary."""

    instructions: str | None = None
    tools: Sequence[ToolNamespace] = ()
    response_format: ResponseFormat | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the history. Use the constructors below; they put channel and recipient in the trained form.

    `name` is the full name of the tool that a TOOL message comes from. `text` is always plain text: what looks like a
    control token in it is encoded as ordinary characters.
    """

    role: Role
    text: str
    channel: Channel | None = None
    recipient: str | None = None
    content_type: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole prompt: preamble, then history in the order it happened.

    `continues`: generation adds to the last message.
    """

    system: System = field(default_factory=System)
    developer: Developer = field(default_factory=Developer)
    messages: Sequence[Message] = ()
    continues: bool = False


def user(text: str) -> Message:
    return Message(Role.USER, text)


def developer(text: str) -> Message:
    """Instructions given in the middle of a conversation."""
    return Message(Role.DEVELOPER, text)


def analysis(text: str) -> Message:
    """Reasoning; left out of the prompt once a final message follows it."""
    return Message(Role.ASSISTANT, text, Channel.ANALYSIS)


def preamble(text: str) -> Message:
    """Text for the user before tool calls."""
    return Message(Role.ASSISTANT, text, Channel.COMMENTARY)


def final(text: str) -> Message:
    return Message(Role.ASSISTANT, text, Channel.FINAL)


def call(
    recipient: str,
    arguments: str,
    *,
    channel: Channel = Channel.COMMENTARY,
    content_type: str | None = "json",
) -> Message:
    """A tool call to `recipient` (full name); `arguments` is the text as it was generated, of JSON at least `{}`."""
    arguments = arguments or ("{}" if content_type == "json" else "")
    return Message(Role.ASSISTANT, arguments, channel, recipient, content_type)


def builtin_call(recipient: str, arguments: str) -> Message:
    """A call of a built-in tool (`python`, `browser.search`): on analysis, marked as code."""
    return call(recipient, arguments, channel=Channel.ANALYSIS, content_type="code")


def tool_result(name: str, text: str, *, channel: Channel = Channel.COMMENTARY) -> Message:
    """The answer of tool `name` (full name), on the channel of its call."""
    return Message(Role.TOOL, text, channel, "assistant", None, name)


def functions(tools: Iterable[ToolSpec]) -> ToolNamespace:
    """The request's own functions as a namespace."""
    return ToolNamespace(FUNCTIONS, "", tuple(tools))
