"""The parts of a turn that a grammar constrains, for the parser.

A grammar that counts characters allows control tokens inside strings, where they are text. So a constrained message
ends only at a stop token.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """Whether a grammar constrains the JSON arguments of `calls`, and the final `answer`."""

    calls: bool = False
    answer: bool = False


NOTHING = Held()


class OpenString:
    """Tracks whether JSON received in pieces ends inside a string."""

    def __init__(self) -> None:
        self._is_open = False
        self._is_escaped = False

    def after(self, text: str) -> bool:
        """Whether a string is open after `text`."""
        for character in text:
            if self._is_escaped:
                self._is_escaped = False
            elif character == '"':
                self._is_open = not self._is_open
            elif character == "\\":
                self._is_escaped = self._is_open
        return self._is_open
