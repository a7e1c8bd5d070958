"""Malformed Harmony that a logits processor makes a real engine write, as questions: `malformed(path)` writes the file.

The forms are those that users of gpt-oss have reported. `python -m tests.cli.eval.malformed FILE` writes them too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm_gptoss.server.harmony.tokens import encoding

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TIME = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}

THOUGHT = "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant"
"""A well-formed beginning; what follows is the malformed part."""

CITY = '<|message|>{"city": "Ulm"}<|call|>'

TEXTS = {
    "well formed": (f"{THOUGHT}<|channel|>final<|message|>Blue.<|return|>", "Blue."),
    "no header": ("Plain words.<|return|>", "Plain words."),
    "no channel": ("<|message|>Blue.<|return|>", "Blue."),
    "no start": ("<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>Blue.<|return|>", "Blue."),
    "no message": (f"{THOUGHT}<|channel|>final I'm sorry.<|return|>", "I'm sorry."),
    "final json": (f'{THOUGHT}<|channel|>final json<|message|>{{"a": 1}}<|return|>', '{"a": 1}'),
    "final constrain json": (f'{THOUGHT}<|channel|>final <|constrain|>json<|message|>{{"a": 1}}<|return|>', '{"a": 1}'),
}
CALLS = {
    "a well-formed call": f"{THOUGHT}<|channel|>commentary to=functions.get_weather <|constrain|>json{CITY}",
    "recipient before the channel": f"{THOUGHT} to=functions.get_weather<|channel|>commentary json{CITY}",
    "recipient twice": f"{THOUGHT}<|channel|>commentary to=functions.get_weather to=functions.get_weather{CITY}",
    "a call in the analysis channel": f"{THOUGHT}<|channel|>analysis to=functions.get_weather json{CITY}",
}
EMPTY = f"{THOUGHT}<|channel|>commentary to=functions.get_time<|message|><|call|>"


def questions() -> list[dict[str, Any]]:
    """All have the same request and a forced answer; whole means that the text or the call arrives."""
    base = {"user": "What is the weather in Paris?", "tools": [WEATHER, TIME]}
    found = [
        {"id": name, **base, "equals": text, "request": forced(written)} for name, (written, text) in TEXTS.items()
    ]
    ulm = [{"name": "get_weather", "arguments": {"city": "Ulm"}}]
    made = [*((name, written, ulm) for name, written in CALLS.items()), ("no arguments", EMPTY, [{"name": "get_time"}])]
    for name, written, calls in made:
        found.append({"id": name, **base, "calls": calls, "ends_with_calls": True, "request": forced(written)})
    return found


def forced(written: str) -> dict[str, Any]:
    return {"vllm_xargs": {"forced": " ".join(map(str, encoding().encode(written, allowed_special="all")))}}


def malformed(path: Path) -> Path:
    """Writes the questions as JSON Lines."""
    path.write_text("".join(json.dumps(question) + "\n" for question in questions()))
    return path


if __name__ == "__main__":
    malformed(Path(sys.argv[1]))
