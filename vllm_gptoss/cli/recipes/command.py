"""The words of somebody's own `vllm serve` line, as they stand behind `--`."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SERVE = re.compile(
    r"(?:(?:\S*/)?vllm serve|(?:\S*/)?python[\d.]* -m vllm\.entrypoints\.(?:openai\.api_server|cli\.main serve)) "
)


def words(command: Sequence[str]) -> list[str]:
    """What stands after `vllm serve`, or a module that is the same; variables that stand before it are left out."""
    found = list(command)
    while found and "=" in found[0] and not found[0].startswith("-"):
        found.pop(0)
    start = _SERVE.match(" ".join([*found[:4], ""]))
    return found[start[0].count(" ") :] if start else [] if found == ["vllm"] else found


def variables(command: Sequence[str]) -> dict[str, str]:
    """Variables that stand before a command, as `NAME=value`."""
    found = {}
    for word in command:
        name, sign, value = word.partition("=")
        if not sign or word.startswith("-"):
            break
        found[name] = value
    return found
