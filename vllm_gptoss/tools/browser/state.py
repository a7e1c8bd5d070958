"""One conversation's displays by cursor: what the model saw, wherever and whenever it was shown."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_gptoss.tools.browser.page import Link, Page, UsageError

MAX_PAGES = 500
MAX_BYTES = 64 << 20
"""Limits of all displays of a conversation. A display's text counts three times: it is also stored as lines."""

MAX_LINKS = 500
"""Links of a display that outlive its process; about 50 kB where a page has that many."""


_OF_A_LINK = 200  # bytes in addition to its texts


@dataclass(slots=True)
class State:
    """The displays that the model saw, by cursor. Displays beyond the bounds lose their text but keep their source.

    `absent`: displays without text, because another process showed them, or this one before a restart.
    """

    pages: list[Page] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    owner: str = ""
    used_at: float = 0.0
    size: int = 0  # bytes
    dropped: int = 0
    absent: set[int] = field(default_factory=set)

    def add(self, page: Page) -> int:
        if not any(page is old for old in self.pages[self.dropped :]):
            self.size += size_of(page)
        self.pages.append(page)
        while self.dropped < len(self.pages) - 1 and (
            self.size > MAX_BYTES or len(self.pages) - self.dropped > MAX_PAGES
        ):
            self.drop()
        return len(self.pages) - 1

    def drop(self) -> None:
        """Takes the oldest display's text and links away; its source stays."""
        old = self.pages[self.dropped]
        if not any(old is other for other in self.pages[self.dropped + 1 :]):
            self.size -= size_of(old)
        self.pages[self.dropped] = Page(old.url, old.title, "", source_url=old.source_url, listing=old.listing)
        if self.dropped == len(self.pages) - 1:  # the one that the model looks at is fetched again
            self.absent.add(self.dropped)
        self.dropped += 1

    def page(self, cursor: int) -> Page:
        """
        Raises:
            UsageError: there is no such display, or it is too long ago.
        """
        if not self.pages:
            raise UsageError("No pages to access! Use `search`, or `open` with a URL as `id`.")
        if cursor == -1:
            return self.pages[-1]
        if not 0 <= cursor < len(self.pages):
            raise UsageError(
                f"Cursor `{cursor}` is out of range. Available cursor indices: [0 - {len(self.pages) - 1}]."
            )
        if cursor < self.dropped and cursor not in self.absent:
            raise UsageError(f"Cursor `{cursor}` is too long ago; open its URL again: {self.pages[cursor].source_url}")
        return self.pages[cursor]

    def agreeing(self, past: Sequence[Mapping[str, Any]]) -> State:
        """This state, if its cursors match `past`; else a new one in which they do.

        past: recalled displays, as `recalled` makes them
        """
        told = {int(memo["cursor"]): memo for memo in past}
        if all(cursor < len(self.pages) and _is(self.pages[cursor], memo) for cursor, memo in told.items()):
            return self
        new = State(owner=self.owner, used_at=self.used_at)
        for cursor in range(max(told) + 1):
            own = self.pages[cursor] if cursor < len(self.pages) else None
            memo = told.get(cursor)
            if own is not None and (memo is None or _is(own, memo)):
                new.add(own)
                if cursor < self.dropped or cursor in self.absent:
                    new.absent.add(cursor)
            else:
                new.add(_page(memo) if memo else Page("", "", ""))
                new.absent.add(cursor)
        return new


def size_of(page: Page) -> int:
    links = sum(len(link.url) + len(link.title) + _OF_A_LINK for link in page.links)
    return 3 * sys.getsizeof(page.text) + links


def recalled(cursor: int, page: Page) -> dict[str, Any]:
    """The fields of a display that a later process needs to cite it, to follow its links and to open it again."""
    return {
        "cursor": cursor,
        "url": page.url,
        "title": page.title,
        "source_url": page.source_url,
        "listing": page.listing,
        "links": [[link.url, link.title, link.line] for link in page.links[:MAX_LINKS]],
        "line_links": [list(pair) for pair in page.line_links[:MAX_LINKS]],
    }


def _page(memo: Mapping[str, Any]) -> Page:
    return Page(
        memo["url"],
        memo["title"],
        "",
        [Link(url, title, line) for url, title, line in memo["links"]],
        memo["source_url"],
        memo["listing"],
        [(first, number) for first, number in memo["line_links"]],
    )


def _is(page: Page, memo: Mapping[str, Any]) -> bool:
    return (page.url, page.title) == (memo["url"], memo["title"])
