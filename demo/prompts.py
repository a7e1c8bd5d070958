"""The prompt of a step as a server writes it: with our renderer, and with vLLM's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from demo.conversation import BUILTIN, Conversation, Step, function, tools
from demo.render import encode

DATE = "2025-06-28"


def past(conversation: Conversation, turn: int, step: int) -> list[str | Step]:
    """User texts and steps before a step, in order."""
    out: list[str | Step] = list(conversation.history)
    for index, this in enumerate(conversation.turns[: turn + 1]):
        out += [this.user, *this.steps[: step if index == turn else None]]
    return out


def raw(conversation: Conversation, turn: int) -> list[int]:
    """A prompt for /v1/completions: no Harmony around it."""
    return encode(conversation.turns[turn].user)


def ours(conversation: Conversation, turn: int, step: int) -> list[int]:
    """With `vllm_gptoss.server.harmony.prompt`."""
    from vllm_gptoss.server.harmony import builtin, messages, prompt
    from vllm_gptoss.server.harmony.events import Channel

    known = {"python": builtin.PYTHON, "browser": builtin.BROWSER}
    system = messages.System(
        date=DATE,
        effort=messages.Effort(conversation.effort or "medium"),
        tools=[known[n] for n in conversation.builtin if n in known],
    )
    spaces = [
        messages.ToolNamespace(
            name, "", [messages.ToolSpec(t, d["description"], d["parameters"]) for t, d in members.items()]
        )
        for name, members in tools()["namespaces"].items()
        if name in conversation.namespaces
    ]
    if conversation.tools:
        offered = [function(name, conversation) for name in conversation.tools]
        spaces.append(
            messages.functions(messages.ToolSpec(t["name"], t["description"], t["parameters"]) for t in offered)
        )
    answer = conversation.format
    developer = messages.Developer(
        conversation.instructions,
        spaces,
        messages.ResponseFormat(answer["name"], answer["schema"]) if answer and "schema" in answer else None,
    )
    said: list[Any] = []
    for item in past(conversation, turn, step):
        if isinstance(item, str):
            said.append(messages.user(item))
            continue
        said += [messages.analysis(item.analysis)] if item.analysis else []
        said += [messages.preamble(item.preamble)] if item.preamble else []
        if item.call is None:
            said += [messages.final(item.text)] if item.text else []
            continue
        kind = "code" if item.channel == "analysis" else "json" if item.json else None
        call = messages.call(item.call, item.text, channel=Channel(item.channel), content_type=kind)
        said.append(replace(call, text=item.text))  # as generated: `call` writes `{}` for empty arguments
        said.append(messages.tool_result(item.call, item.results[0], channel=Channel(item.channel)))
    return prompt.render(messages.Conversation(system, developer, said))


def _upstream_step(item: Step) -> list[Any]:
    from openai_harmony import Author, Message, Role

    out = []
    if item.analysis:
        out.append(Message.from_role_and_content(Role.ASSISTANT, item.analysis).with_channel("analysis"))
    if item.preamble:
        out.append(Message.from_role_and_content(Role.ASSISTANT, item.preamble).with_channel("commentary"))
    if item.call is None:
        return (
            [*out, Message.from_role_and_content(Role.ASSISTANT, item.text).with_channel("final")] if item.text else out
        )
    call = Message.from_role_and_content(Role.ASSISTANT, item.text).with_channel(item.channel).with_recipient(item.call)
    if item.content_type:
        call = call.with_content_type("code" if item.channel == "analysis" else "json")
    result = Message.from_author_and_content(Author.new(Role.TOOL, item.call), item.results[0])
    return [*out, call, result.with_channel(item.channel).with_recipient("assistant")]


def upstream(conversation: Conversation, turn: int, step: int) -> list[int]:
    """With vLLM's `harmony_utils`; namespaces are left out, it has no place for them."""
    from openai_harmony import Message, Role, ToolNamespaceConfig
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.entrypoints.openai.parser import harmony_utils

    functions = [function(name, conversation) for name in conversation.tools or ()]
    offered = [
        ChatCompletionToolsParam.model_validate(
            {"type": "function", "function": {k: v for k, v in f.items() if k != "type"}}
        )
        for f in functions
    ]
    builtin = {
        f"{name}_description": getattr(ToolNamespaceConfig, name)()
        for name in conversation.builtin
        if name in BUILTIN[:2]
    }
    said = harmony_utils.build_harmony_preamble(
        instructions=conversation.instructions,
        tools=offered or None,
        reasoning_effort=conversation.effort,
        with_custom_tools=bool(offered),
        **builtin,
    )
    for item in past(conversation, turn, step):
        said += [Message.from_role_and_content(Role.USER, item)] if isinstance(item, str) else _upstream_step(item)
    ids: list[int] = harmony_utils.render_for_completion(said)
    return ids
