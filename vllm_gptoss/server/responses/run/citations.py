"""From gpt-oss' marks, `【3†L10-L12】`, to the API's annotations.

Browser tool of the "Harmony response format": `【{cursor}†L{line_start}(-L{line_end})?】`. The mark becomes a
Markdown link to the page, and the annotation spans that link. A mark with an unknown cursor stays unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from vllm_gptoss.tools.protocol import Source

OPEN = "【"
_MARK = re.compile(r"【(\d{1,6})†(?:L(\d{1,7})(?:[-–‑]L?(\d{1,7}))?(?:†[^【】]{0,64})?|[^【】]{0,64})】")
_LONGEST = 96
"""Characters of an open bracket's text that are held back; longer text is no citation."""

_LONGEST_QUOTE = 200
"""Characters."""

Annotation = dict[str, Any]


class Citations:
    """Reads text in pieces and returns it with resolved marks. `source` finds the page of a cursor and line."""

    def __init__(self, source: Callable[[int, int | None], Source | None]) -> None:
        self._source = source
        self._held = ""
        self._length = 0

    def passes(self, text: str) -> bool:
        """As `feed` of text in which no mark is or may be, the usual case. False, and nothing read, for other text."""
        if self._held or OPEN in text:
            return False
        self._length += len(text)
        return True

    def feed(self, text: str) -> Iterator[tuple[str, Annotation | None]]:
        """Pieces of text in order; a piece with an annotation is the link that the annotation spans."""
        if self.passes(text):
            yield text, None
            return
        self._held += text
        while self._held:
            at = self._held.find(OPEN)
            if at != 0:
                ready = self._held if at < 0 else self._held[:at]
                self._held = "" if at < 0 else self._held[at:]
                yield self._plain(ready)
            elif mark := _MARK.match(self._held):
                self._held = self._held[mark.end() :]
                yield self._cite(mark)
            elif "】" in self._held or OPEN in self._held[1:] or len(self._held) > _LONGEST:
                yield self._plain(self._held[0])
                self._held = self._held[1:]
            else:
                return

    def flush(self) -> Iterator[tuple[str, Annotation | None]]:
        """The text that was held back when the message ended."""
        held, self._held = self._held, ""
        if held:
            yield self._plain(held)

    def _plain(self, text: str) -> tuple[str, Annotation | None]:
        self._length += len(text)
        return text, None

    def _cite(self, mark: re.Match[str]) -> tuple[str, Annotation | None]:
        source = self._source(int(mark[1]), int(mark[2]) if mark[2] else None)
        if source is None:
            return self._plain(mark[0])
        link = f"([{urlsplit(source.url).hostname or source.title}]({source.url}))"
        start, self._length = self._length, self._length + len(link)
        annotation: Annotation = {
            "type": "url_citation",
            "start_index": start,
            "end_index": self._length,
            "url": source.url,
            "title": source.title,
        }
        if mark[2]:
            annotation["lines"] = [int(mark[2]), int(mark[3] or mark[2])]
        if source.quote:
            annotation["quote"] = source.quote[:_LONGEST_QUOTE]
        return link, annotation
