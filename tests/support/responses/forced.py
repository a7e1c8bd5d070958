"""The model's answers to Codex and Claude Code, and a logits processor that makes a real engine generate them.

Their prompts are long and their own, so the small model cannot have learned them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tests.support.forcing import Forcing
from vllm_gptoss.server.harmony.tokens import encoding

THINK = "<|channel|>analysis<|message|>Let me do it.<|end|><|start|>assistant"
COMMAND = ' to=functions.exec_command<|channel|>commentary json<|message|>{"cmd":"echo hello > hello.txt"}<|call|>'
WROTE = "<|channel|>final<|message|>I wrote hello.<|return|>"


def codex(prompt: Sequence[int]) -> list[int]:
    """The command, and when the prompt has a tool's answer, the final words."""
    answered = "to=assistant<|channel|>commentary" in encoding().decode(list(prompt))
    said: list[int] = encoding().encode(THINK + (WROTE if answered else COMMAND), allowed_special="all")
    return said


def claude(prompt: Sequence[int]) -> list[int]:
    """A file is written, edited and copied, one call after each result; then the final words."""
    text = encoding().decode(list(prompt))
    folder = found[1] if (found := re.search(r"working directory: (\S+)", text)) else "/"
    calls: list[tuple[str, dict[str, str]]] = [
        ("Write", {"file_path": f"{folder}/hello.txt", "content": "hello\n"}),
        ("Edit", {"file_path": f"{folder}/hello.txt", "old_string": "hello", "new_string": "goodbye"}),
        ("Bash", {"command": "cp hello.txt copy.txt", "description": "Copy the file"}),
    ]
    done = text.count("to=assistant<|channel|>commentary")
    said = WROTE
    if done < len(calls):
        name, arguments = calls[done]
        said = f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(arguments)}<|call|>"
    ids: list[int] = encoding().encode(THINK + said, allowed_special="all")
    return ids


def agent(prompt: Sequence[int]) -> list[int]:
    """The client of a prompt, recognised by a tool that only Codex has."""
    return (codex if "type exec_command = " in encoding().decode(list(prompt)) else claude)(prompt)


class ForcedAgents(Forcing):
    """Every request is answered with `agent`. A grammar still judges the tokens: it sees what was sampled."""

    def answer(self, prompt: Sequence[int], params: Any) -> list[int]:
        del params
        return agent(prompt)
