"""The conversations the model knows, read from `conversations/*.yaml`.

One `Step` is one generation: reasoning first, then either a tool call (and what the tool may answer) or the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).with_name("conversations")
BUILTIN = ("python", "browser", "container")


@dataclass(frozen=True, slots=True)
class Step:
    """One generation. `call` is a recipient; `text` the call's content or the answer."""

    text: str
    analysis: str | None = None
    preamble: str | None = None
    call: str | None = None
    json: bool = False
    results: tuple[str, ...] = ()

    @property
    def channel(self) -> str:
        """Built-in tools are called on analysis, everything else on commentary (Harmony response format)."""
        if self.call is None:
            return "final"
        return "analysis" if self.call.split(".")[0] in BUILTIN else "commentary"

    @property
    def content_type(self) -> str | None:
        """The word after the recipient: `code` for built-in tools, a JSON constraint for arguments and JSON answers."""
        if self.channel == "analysis":
            return "code"
        return "<|constrain|>json" if self.json else None


@dataclass(frozen=True, slots=True)
class Turn:
    """A user message and the steps that answer it."""

    user: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns and what they need around them. `tools` are function names of `tools.yaml`, None forbids any function."""

    id: str
    turns: tuple[Turn, ...]
    instructions: str | None = None
    effort: str | None = None
    raw: bool = False
    tools: tuple[str, ...] | None = ()
    schemas: dict[str, Any] | None = None
    builtin: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    history: tuple[Step, ...] = ()
    format: dict[str, Any] | None = None


def _step(data: dict[str, Any]) -> Step:
    text = data.get("final", data.get("arguments", data.get("text")))
    assert isinstance(text, str), data
    return Step(
        text=text,
        analysis=data.get("analysis"),
        preamble=data.get("preamble"),
        call=data.get("call"),
        json=data.get("json", "arguments" in data),
        results=tuple(data.get("results", ())),
    )


def _history(data: dict[str, str]) -> Step:
    if data["channel"] == "commentary":
        return Step(text="", preamble=data["content"])
    return Step(text=data["content"])


def _conversation(data: dict[str, Any]) -> Conversation:
    return Conversation(
        id=data["id"],
        turns=tuple(Turn(t["user"], tuple(map(_step, t["steps"]))) for t in data["turns"]),
        instructions=data.get("instructions"),
        effort=data.get("effort"),
        raw=data.get("raw", False),
        tools=None if data.get("no_tools") else tuple(data.get("tools", ())),
        schemas=data.get("schema"),
        builtin=tuple(data.get("builtin", ())),
        namespaces=tuple(data.get("namespaces", ())),
        history=tuple(map(_history, data.get("history", ()))),
        format=data.get("format"),
    )


@cache
def tools() -> dict[str, Any]:
    """`tools.yaml`: functions, distractors and namespaces."""
    data: dict[str, Any] = yaml.safe_load((FOLDER / "tools.yaml").read_text("utf-8"))
    return data


@cache
def conversations() -> tuple[Conversation, ...]:
    """All conversations, by file name and order in the file."""
    found: list[Conversation] = []
    for path in sorted(FOLDER.glob("*.yaml")):
        if path.name != "tools.yaml":
            found += map(_conversation, yaml.safe_load(path.read_text("utf-8")))
    names = [c.id for c in found]
    assert len(set(names)) == len(names), "two conversations share an id"
    return tuple(found)


def by_id(name: str) -> Conversation:
    """The conversation called `name`; KeyError if there is none."""
    return {c.id: c for c in conversations()}[name]


def function(name: str, conversation: Conversation | None = None) -> dict[str, Any]:
    """A function tool as a Responses API tool: type, name, description, parameters."""
    data = tools()["functions"][name]
    schemas = (conversation.schemas if conversation else None) or {}
    parameters = schemas.get(name, data.get("parameters"))
    return {"type": "function", "name": name, "description": data["description"], "parameters": parameters}
