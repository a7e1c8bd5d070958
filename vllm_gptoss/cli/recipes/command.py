"""The words of a user's `vllm serve` line, given after `--`."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SERVE = re.compile(
    r"(?:(?:\S*/)?vllm serve|(?:\S*/)?python[\d.]* -m vllm\.entrypoints\.(?:openai\.api_server|cli\.main serve)) "
)


def words(command: Sequence[str]) -> list[str]:
    """The words after `vllm serve`, or after the module that it runs, without the variables in front."""
    found = list(command)
    while found and "=" in found[0] and not found[0].startswith("-"):
        found.pop(0)
    start = _SERVE.match(" ".join([*found[:4], ""]))
    return found[start[0].count(" ") :] if start else [] if found == ["vllm"] else found


def variables(command: Sequence[str]) -> dict[str, str]:
    """Variables in front of a command, as `NAME=value`."""
    found = {}
    for word in command:
        name, sign, value = word.partition("=")
        if not sign or word.startswith("-"):
            break
        found[name] = value
    return found
