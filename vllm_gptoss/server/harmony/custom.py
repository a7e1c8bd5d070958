"""Custom tools, which take text: their description in the prompt, and the input of a call.

Without a grammar the prompt shows a function with one string, `input`, as the model was trained to call. With a grammar
the model writes the text itself, without JSON around it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

INPUT_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of a custom tool without a grammar."""


def description_of(description: str | None, grammar: Mapping[str, str] | None) -> str:
    """The description in the prompt; `grammar` has the keys `syntax` and `definition`."""
    text = description or ""
    if grammar:
        text += f"\nThe input is plain text, not JSON, in this {grammar['syntax']} grammar:\n{grammar['definition']}"
    return text.strip()


def arguments_of(text: str) -> str:
    """The arguments of a call of a tool without a grammar."""
    return json.dumps({"input": text}, ensure_ascii=False)


class InputUnwrapper:
    """Decodes the string in `{"input": "…"}` while the model writes it."""

    def __init__(self) -> None:
        self._is_inside = self._is_over = False
        self._held = ""

    def feed(self, text: str) -> str:
        """The decoded characters that `text` completes, often none."""
        self._held += text
        if not self._is_inside:
            began = _INPUT.match(self._held)
            if began is None:
                return ""
            self._is_inside, self._held = True, self._held[began.end() :]
        if self._is_over:
            return ""
        whole = _STRING.match(self._held)
        assert whole is not None  # the pattern also matches the empty string
        rest = self._held[whole.end() :]
        self._is_over, self._held = rest.startswith('"'), rest
        decoded = json.loads(f'"{whole[0]}"', strict=False)
        # Half a surrogate pair is a str for Python, but no text that can be sent.
        return str(decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    def end(self, text: str, *, cut: bool) -> str:
        """The remaining characters at the end of a call with the text `text`; the whole text if it is other JSON."""
        if not self._is_inside:
            return text
        return "" if cut or self._is_over else self._held


_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_STRING = re.compile(
    r"""(?:[^"\\]                            # a character
        |\\["\\/bfnrt]                        # an escape
        |\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}     # both halves of a surrogate pair
        |\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u])     # the first half without a second
        |\\u(?![dD][89abAB])[0-9a-fA-F]{4}
        )*""",
    re.VERBOSE,
)
"""The complete part of a JSON string (RFC 8259, section 7), up to the closing quote or an unfinished escape."""
