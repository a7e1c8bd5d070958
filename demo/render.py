"""A step of a conversation -> prompt text, with the spans that must not matter, and the token ids to learn.

The prompt is a random choice of the forms that servers write: vLLM's renderer, the plugin's and the chat template of
the checkpoints differ in header order, dropped reasoning and system message, and users differ in everything else.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from openai_harmony import HarmonyEncodingName, load_harmony_encoding

from demo.conversation import BUILTIN, Conversation, Step, function, tools
from demo.words import INSTRUCTIONS, filler, output

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
FALLBACK = Step(
    "I only know a few conversations by heart, and this is not one of them.",
    analysis="This is not a conversation that I know.",
)

Tool = tuple[str, str, Any]
"""Name, description, parameters."""


@cache
def encoding() -> Any:
    """o200k_harmony from oss-harmony, no network."""
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


@cache
def token_length(token: int) -> int:
    """Bytes of one token as text."""
    if token >= 199998:
        return len(encoding().decode([token]).encode())
    return len(encoding()._inner.decode_bytes([token]))


def encode(text: str) -> list[int]:
    """Ids of `text`, control tokens included."""
    ids: list[int] = encoding().encode(text, allowed_special="all")
    return ids


@dataclass(slots=True)
class Prompt:
    """Text under construction. `noise` are byte spans that must not change the answer."""

    text: str = ""
    noise: list[tuple[int, int]] = field(default_factory=list)
    _bytes: int = 0

    def add(self, text: str, noise: bool = False) -> None:
        start, self._bytes = self._bytes, self._bytes + len(text.encode())
        self.text += text
        if noise and text:
            self.noise.append((start, self._bytes))

    def tokens(self) -> tuple[list[int], list[bool]]:
        """Ids, and for each whether it lies wholly inside a noise span."""
        ids = encode(self.text)
        marks, at, spans = [], 0, iter(self.noise)
        span = next(spans, None)
        for token in ids:
            end = at + token_length(token)
            while span and span[1] < end:
                span = next(spans, None)
            marks.append(bool(span) and span[0] <= at and token < 199998)
            at = end
        return ids, marks


def target(step: Step) -> str:
    """Text that the model generates for `step`, from the first header to the stop token."""
    parts = []
    if step.analysis:
        parts.append(f"<|channel|>analysis<|message|>{step.analysis}<|end|>")
    if step.preamble:
        parts.append(f"<|channel|>commentary<|message|>{step.preamble}<|end|>")
    header = f"<|channel|>{step.channel}"
    if step.call:
        header += f" to={step.call}"
    if step.content_type:
        header += f" {step.content_type}"
    stop = "<|call|>" if step.call else "<|return|>"
    parts.append(f"{header}<|message|>{step.text}{stop}")
    return "<|start|>assistant".join(parts)


def _call_header(step: Step, rng: random.Random) -> str:
    """The header of a past call: as generated, as the chat template has it, as vLLM 0.32 writes analysis calls."""
    kind = step.content_type or ""
    style = rng.random()
    if style < 0.4:
        bare = kind.replace("<|constrain|>", "")
        return f"assistant to={step.call}<|channel|>{step.channel}" + (f" {bare}" if bare else "")
    if style < 0.8:
        return f"assistant<|channel|>{step.channel} to={step.call}" + (f" {kind}" if kind else "")
    full = kind if not kind or kind.startswith("<|") else f"<|constrain|>{kind}"
    return f"assistant to={step.call}<|channel|>{step.channel}" + (f" {full}" if full else "")


def past_step(prompt: Prompt, step: Step, rng: random.Random, analysis: bool, result: bool = True) -> None:
    """A step that has happened: its messages in one of the known forms, and the tool's answer."""
    said = []
    if step.analysis and analysis:
        said.append(f"<|start|>assistant<|channel|>analysis<|message|>{step.analysis}<|end|>")
    if step.preamble:
        said.append(f"<|start|>assistant<|channel|>commentary<|message|>{step.preamble}<|end|>")
    if len(said) == 2 and rng.random() < 0.3:
        said.reverse()
    prompt.add("".join(said))
    if step.call is None:
        if step.text:
            kind = f" {step.content_type}" if step.content_type and rng.random() < 0.5 else ""
            prompt.add(f"<|start|>assistant<|channel|>final{kind}<|message|>{step.text}<|end|>")
        return
    end = "<|call|>" if rng.random() < 0.85 else "<|end|>"
    prompt.add(f"<|start|>{_call_header(step, rng)}<|message|>{step.text}{end}")
    if result:
        _result(prompt, step, rng)


def _result(prompt: Prompt, step: Step, rng: random.Random) -> None:
    name = step.call or ""
    channel = f"<|channel|>{step.channel}"
    style = rng.random()
    if style < 0.5:
        prompt.add(f"<|start|>{name} to=assistant{channel}<|message|>")
    elif style < 0.95:
        prompt.add(f"<|start|>{name}{channel} to=assistant<|message|>")
    else:
        prompt.add(f"<|start|>{name} to=assistant<|message|>")
    length = rng.choice((0, 3, 3, 10, 10, 40, 40, 150, 400, rng.choice((1000, 2500))))
    text = rng.choice(step.results) if step.results and rng.random() < 0.5 else output(rng, length)
    if rng.random() < 0.2:
        text = json.dumps(text, ensure_ascii=False)
    prompt.add(text, noise=True)
    prompt.add("<|end|>")


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(v) for v in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(map(_type, schema["anyOf"]))
    kind = schema.get("type", "any")
    if kind == "array":
        return _type(schema.get("items", {})) + "[]"
    if kind == "object" and schema.get("properties"):
        return _object(schema)
    return {"integer": "number"}.get(kind, kind)


def _object(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    lines = ["{"]
    for name, value in schema.get("properties", {}).items():
        if "description" in value:
            lines.append(f"// {value['description']}")
        lines.append(f"{name}{'' if name in required else '?'}: {_type(value)},")
    return "\n".join((*lines, "}"))


def _namespace(prompt: Prompt, name: str, members: list[Tool], rng: random.Random) -> None:
    prompt.add(f"\n\n## {name}\n\n")
    if name != "functions" and rng.random() < 0.3:
        prompt.add(f"// {filler(rng, rng.randint(2, 20))}\n", noise=True)
    prompt.add(f"namespace {name} {{\n")
    for tool, description, parameters in members:
        prompt.add("\n// ")
        prompt.add(description, noise=True)
        prompt.add("\ntype ")
        prompt.add(tool, noise=tool not in _known_tools())
        shape = f"(_: {_object(parameters)})" if (parameters or {}).get("properties") else "()"
        prompt.add(f" = {shape} => any;", noise=True)
        prompt.add("\n")
    prompt.add(f"\n}} // namespace {name}")


@cache
def _known_tools() -> frozenset[str]:
    return frozenset((*tools()["functions"], *(t for members in tools()["namespaces"].values() for t in members)))


def _distractor(rng: random.Random) -> Tool:
    """A tool that no conversation calls, often with a made-up name."""
    tool = rng.choice(tools()["distractors"])
    if rng.random() < 0.4:
        return tool["name"], tool["description"], tool["parameters"]
    names = [filler(rng, 1).strip('.,:;!?() -\n"').lower() or "x" for _ in range(3)]
    return "_".join(names[:2]), filler(rng, rng.randint(1, 30)), {"type": "object", "properties": {names[2]: {}}}


def _functions(conversation: Conversation, rng: random.Random) -> list[Tool]:
    if conversation.tools is None:
        return []
    offered = []
    for name in conversation.tools:
        tool = function(name, conversation)
        variants = [tool["description"], *tools()["functions"][name].get("variants", ())]
        text = rng.choice(variants) if rng.random() < 0.8 else filler(rng, rng.randint(2, 25))
        offered.append((name, text, tool["parameters"]))
    extra = rng.randint(1, 3) if rng.random() < 0.3 else 0
    offered += [_distractor(rng) for _ in range(extra)]
    if rng.random() < 0.1:
        known = [n for n in tools()["functions"] if n not in conversation.tools]
        offered += [
            (n, tools()["functions"][n]["description"], tools()["functions"][n].get("parameters"))
            for n in rng.sample(known, 2)
        ]
    rng.shuffle(offered)
    return offered


def system(prompt: Prompt, conversation: Conversation, rng: random.Random, commentary: list[str]) -> None:
    """The system message: dates, effort, built-in tools (missing or added at times), channels."""
    prompt.add("<|start|>system<|message|>")
    prompt.add(IDENTITY if rng.random() < 0.9 else filler(rng, 8), noise=True)
    if rng.random() < 0.95:
        prompt.add(f"\nKnowledge cutoff: {rng.randint(2023, 2026)}-{rng.randint(1, 12):02}", noise=True)
    if rng.random() < 0.95:
        prompt.add(
            f"\nCurrent date: {rng.randint(2024, 2027)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}", noise=True
        )
    prompt.add(f"\n\nReasoning: {conversation.effort or rng.choice(('low', 'medium', 'medium', 'high'))}\n\n")
    builtin = [name for name in conversation.builtin if rng.random() < 0.95]
    if rng.random() < 0.15:
        builtin = sorted({*builtin, rng.choice(("python", "browser"))})
    if builtin:
        prompt.add("# Tools\n\n")
    for name in builtin:
        prompt.add(_builtin_text(name, rng), noise=True)
        prompt.add("\n\n")
    prompt.add(CHANNELS)
    if commentary:
        names = ", ".join(f"'{n}'" for n in commentary) if rng.random() < 0.5 else "'functions'"
        prompt.add(f"\nCalls to these tools must go to the commentary channel: {names}.")
    prompt.add("<|end|>")


@cache
def _builtin_namespace(name: str) -> str:
    from openai_harmony import Conversation as Talk
    from openai_harmony import Message, Role, SystemContent, ToolNamespaceConfig

    config = getattr(ToolNamespaceConfig, name)()
    message = Message.from_role_and_content(Role.SYSTEM, SystemContent.new().with_tools(config))
    text: str = encoding().decode(encoding().render_conversation(Talk.from_messages([message])))
    return text[text.index(f"## {name}") : text.index("\n\n# Valid channels")]


def _builtin_text(name: str, rng: random.Random) -> str:
    if name == "container" or rng.random() < 0.15:
        return f"## {name}\n\n// {filler(rng, rng.randint(5, 60))}"
    return _builtin_namespace(name)


def developer(prompt: Prompt, conversation: Conversation, rng: random.Random, functions: list[Tool]) -> None:
    """The developer message: instructions, functions and namespaces, response format; none if it would be empty."""
    text = conversation.instructions
    random_text = None
    if text is None and rng.random() < 0.5:
        random_text = (
            rng.choice(INSTRUCTIONS)
            if rng.random() < 0.5
            else filler(rng, rng.choice((4, 12, 12, 40, 40, 120, 120, 500)))
        )
    parts: list[tuple[str, bool]] = []
    if text or random_text:
        parts = [("# Instructions\n\n", False), (text or random_text or "", text is None)]
    spaces = dict(tools()["namespaces"])
    shown = [n for n in conversation.namespaces if n in spaces]
    answer = conversation.format if conversation.format and rng.random() < 0.5 else None
    if not (parts or functions or shown or answer):
        return
    prompt.add("<|start|>developer<|message|>")
    for piece, noise in parts:
        prompt.add(piece, noise)
    if parts and (functions or shown) and rng.random() < 0.15:  # a system message in the input is a second message
        prompt.add("<|end|><|start|>developer<|message|>")
    elif parts and (functions or shown or answer):
        prompt.add("\n\n")
    if functions or shown:
        prompt.add("# Tools")
    if shown and rng.random() < 0.05:
        _namespace(prompt, filler(rng, 1).strip('.,:;!?() -\n"'), [_distractor(rng)], rng)
    for name in shown:
        members = [(t, d["description"], d["parameters"]) for t, d in spaces[name].items()]
        members += [_distractor(rng)] if rng.random() < 0.2 else []
        _namespace(prompt, name, rng.sample(members, len(members)), rng)
    if functions:
        _namespace(prompt, "functions", functions, rng)
    if answer:
        prompt.add(("\n\n" if functions or shown else "") + f"# Response Formats\n\n## {answer['name']}\n\n")
        prompt.add(json.dumps(answer.get("schema", {"type": "object"}), separators=(",", ":")), noise=True)
    prompt.add("<|end|>")


def preamble(prompt: Prompt, conversation: Conversation, rng: random.Random) -> None:
    """System and developer message."""
    functions = _functions(conversation, rng)
    commentary = [*conversation.namespaces, *(["functions"] if functions else [])]
    if rng.random() < 0.98 or conversation.effort:
        system(prompt, conversation, rng, commentary if rng.random() < 0.9 else [])
    developer(prompt, conversation, rng, functions)


def messages(prompt: Prompt, conversation: Conversation, turn: int, step: int, rng: random.Random) -> None:
    """User and assistant messages up to the requested step."""
    for past in conversation.history:
        past_step(prompt, past, rng, analysis=False)
    for index, this in enumerate(conversation.turns[: turn + 1]):
        prompt.add(f"<|start|>user<|message|>{this.user}<|end|>")
        now = index == turn
        spent = not now and rng.random() < 0.85  # reasoning before an answer is dropped by every renderer
        thoughts = rng.random() < (0.6 if now else 0.1)
        for past in this.steps[: step if now else None]:
            if not (spent and past.call and past.call.split(".")[0] in BUILTIN):
                past_step(prompt, past, rng, analysis=thoughts and not spent)
