"""What a grammar holds while a turn is generated, as the parser must know it.

A grammar that counts characters has no room for what may not be spelled, so that a control token can stand in a string.
There it is text: a held message ends at a stop token and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """`calls`: the JSON arguments of calls are held by a grammar; `answer`: the final message is."""

    calls: bool = False
    answer: bool = False


NOTHING = Held()


class OpenString:
    """Whether JSON that comes in parts ends inside a string."""

    def __init__(self) -> None:
        self._is_open = False
        self._is_escaped = False

    def after(self, text: str) -> bool:
        """Whether a string is open once `text` has come, too."""
        for character in text:
            if self._is_escaped:
                self._is_escaped = False
            elif character == '"':
                self._is_open = not self._is_open
            elif character == "\\":
                self._is_escaped = self._is_open
        return self._is_open
