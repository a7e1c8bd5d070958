"""Renders a conversation to the token ids that gpt-oss was trained on.

The text follows OpenAI's "Harmony response format" and openai/harmony's test data, and the chat template of the
checkpoints for the order of a header (`assistant to=functions.f<|channel|>commentary json`); docs/harmony.md lists
where these sources disagree and which one is followed.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence

from vllm_gptoss.server.harmony.events import Channel
from vllm_gptoss.server.harmony.messages import Conversation, Developer, Message, Role, System, ToolNamespace
from vllm_gptoss.server.harmony.schema import function_type
from vllm_gptoss.server.harmony.tokens import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START, TooManyTokensError, encode

_CONSTRAIN = "<|constrain|>"

FINAL_HEADER = (CHANNEL, *encode(Channel.FINAL.value), MESSAGE)
"""The header of an answer, as generated: `<|channel|>final<|message|>`."""


def today() -> str:
    """The date of system messages, YYYY-MM-DD: vLLM's VLLM_SYSTEM_START_DATE, else that of the server's time zone."""
    return os.environ.get("VLLM_SYSTEM_START_DATE") or datetime.date.today().isoformat()


def render(conversation: Conversation, most: int | None = None) -> list[int]:
    """Prompt token ids, ending in `<|start|>assistant`: generation continues with the first header. Or they end in the
    text of the last message, where the conversation continues that.

    Analysis before the last final message is left out, built-in tool calls and their results on that channel too.
    Raises `TooManyTokensError` as soon as there are more than `most`.
    """
    ids = _preamble(conversation, most)
    before = conversation.messages[:-1] if conversation.continues else conversation.messages
    for message in without_spent_analysis(before):
        ids += render_message(message, _left(ids, most))
    if conversation.continues:
        ids += render_message(conversation.messages[-1], _left(ids, most))[:-1]
    else:
        ids += [START, *encode(Role.ASSISTANT.value)]
    _left(ids, most)
    return ids


def is_longer(conversation: Conversation, most: int) -> bool:
    """Whether the prompt has more than `most` tokens; reads no more of it than that."""
    try:
        render(conversation, most)
    except TooManyTokensError:
        return True
    return False


def _left(ids: Sequence[int], most: int | None) -> int | None:
    if most is None:
        return None
    if len(ids) > most:
        raise TooManyTokensError
    return most - len(ids)


def render_message(message: Message, most: int | None = None) -> list[int]:
    """Token ids of one message, `<|start|>` to its end token. `most`: see `encode`."""
    author = message.name if message.role is Role.TOOL and message.name else message.role.value
    ids = [START, *encode(author if message.recipient is None else f"{author} to={message.recipient}")]
    if message.channel is not None:
        ids += [CHANNEL, *encode(message.channel.value)]
    if message.content_type is not None:
        ids += _content_type(message.content_type)
    text = f"# Instructions\n\n{message.text}" if message.role is Role.DEVELOPER else message.text
    is_call = message.role is Role.ASSISTANT and message.recipient is not None
    return [*ids, MESSAGE, *encode(text, most), CALL if is_call else END]


def system_text(system: System, commentary: Sequence[ToolNamespace] = ()) -> str:
    """The system message; `commentary`: the developer's namespaces, called on the commentary channel."""
    facts = [system.identity]
    if system.knowledge_cutoff:
        facts.append(f"Knowledge cutoff: {system.knowledge_cutoff}")
    if system.date:
        facts.append(f"Current date: {system.date}")
    sections = ["\n".join(facts), f"Reasoning: {system.effort.value}"]
    if system.tools:
        sections.append(_tools(sorted(system.tools, key=lambda n: n.name)))
    channels = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    if commentary:
        names = ", ".join(f"'{namespace.name}'" for namespace in commentary)
        channels += f"\nCalls to these tools must go to the commentary channel: {names}."
    return "\n\n".join((*sections, channels))


def developer_text(developer: Developer) -> str:
    """The developer message, or "" without content."""
    sections = []
    if developer.instructions:
        sections.append(f"# Instructions\n\n{developer.instructions}")
    if developer.tools:
        sections.append(_tools(developer.tools))
    if answer := developer.response_format:
        schema = json.dumps(answer.schema, ensure_ascii=False, separators=(",", ":"))
        described = "".join(f"// {line}\n" for line in answer.description.splitlines())
        sections.append(f"# Response Formats\n\n## {answer.name}\n\n{described}{schema}")
    return "\n\n".join(sections)


def _preamble(conversation: Conversation, most: int | None) -> list[int]:
    developer = conversation.developer
    ids = [START, *encode("system"), MESSAGE]
    ids += [*encode(system_text(conversation.system, developer.tools), most), END]
    if text := developer_text(developer):
        ids += [START, *encode("developer"), MESSAGE, *encode(text, most), END]
    return ids


def _content_type(content_type: str) -> list[int]:
    if content_type.startswith(_CONSTRAIN):
        return [*encode(" "), CONSTRAIN, *encode(content_type[len(_CONSTRAIN) :])]
    return encode(f" {content_type}")


def without_spent_analysis(messages: Sequence[Message]) -> list[Message]:
    """The messages that a prompt shows: analysis before the last final message is left out."""
    last_final = max((i for i, m in enumerate(messages) if m.channel is Channel.FINAL), default=-1)
    return [m for i, m in enumerate(messages) if i > last_final or m.channel is not Channel.ANALYSIS]


def _tools(namespaces: Sequence[ToolNamespace]) -> str:
    return "\n\n".join(("# Tools", *map(_namespace, namespaces)))


def _namespace(namespace: ToolNamespace) -> str:
    lines = [f"## {namespace.name}\n"]
    if not namespace.tools:
        return "\n".join((*lines, *namespace.description.splitlines()))
    lines += _commented(namespace.description)
    lines.append(f"namespace {namespace.name} {{\n")
    for tool in namespace.tools:
        lines += _commented(tool.description)
        lines.append(f"type {tool.name} = {function_type(tool.parameters)};\n")
    return "\n".join((*lines, f"}} // namespace {namespace.name}"))


def _commented(text: str) -> list[str]:
    return [f"// {line}" for line in text.splitlines()]
