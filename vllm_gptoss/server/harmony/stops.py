"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Returns text up to the first stop string; delays text that may be the beginning of one.

    `found` is the stop string that ended the text; later pieces are dropped.
    """

    def __init__(self, stops: Sequence[str] = (), *, keeps_stop: bool = False) -> None:
        self.found: str | None = None
        self._stops = tuple(filter(None, stops))
        self._longest = max(map(len, self._stops), default=0)
        self._keeps_stop = keeps_stop
        self._held = ""

    @property
    def holds(self) -> bool:
        """Whether text is delayed."""
        return bool(self._held)

    def feed(self, text: str) -> str:
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        text, self._held = self._held + text, ""
        if ends := [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]:
            at, self.found = min(ends)
            return text[: at + len(self.found) * self._keeps_stop]
        safe = len(text) - self._open(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """The delayed text, at an end without a stop string."""
        held, self._held = self._held, ""
        return held

    def _open(self, text: str) -> int:
        """The number of characters at the end of `text` that begin a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
