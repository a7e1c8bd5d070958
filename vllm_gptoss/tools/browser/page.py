"""A page as gpt-oss sees it: a window of numbered, wrapped lines, sized in tokens, or the matches of a pattern.

The display is the one gpt-oss was trained on (openai/gpt-oss, `simple_browser`): lines of 80 characters counted from
`L0`, links as `【id†text†domain】`, a header with title, URL and `viewing lines [a - b] of n`.
"""

from __future__ import annotations

import re
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote, unquote, urlsplit

WIDTH = 80
"""Characters per line: citations name lines, so this is part of the format."""

_LINK = re.compile(r"【\d+†(?P<text>[^†】]+)(?:†[^†】]*)?】")
_BRACKETS = str.maketrans({"【": "〖", "】": "〗", "\u200b": None})
_NON_ASCII = re.compile(r"[^\x00-\x7f]")


class UsageError(Exception):
    """The model requested something that does not exist; its message is what the model reads."""


@dataclass(frozen=True, slots=True)
class Link:
    """A numbered link of a page. `line` is where a click should land, for links made by `find`."""

    url: str
    title: str = ""
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """One display of the browser.

    `url` is shown in the header and empty for search results. `source_url` is what a citation of this page means; a
    find result's is the page that was searched. `listing` marks search and find results, in which `find` is refused.
    """

    url: str
    title: str
    text: str
    links: Sequence[Link] = ()
    source_url: str = ""
    listing: bool = False
    line_links: Sequence[tuple[int, int]] = ()  # (first line, link) of each result, ascending
    _cache: dict[str, list[tuple[str, bool]]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def wrapped(self) -> list[tuple[str, bool]]:
        """Each display line, and whether it goes on in the next one without a line break in the source."""
        if "lines" not in self._cache:
            self._cache["lines"] = wrap(self.text)
        return self._cache["lines"]

    @property
    def lines(self) -> list[str]:
        return [line for line, _ in self.wrapped]


def under_url(page: Page) -> Page:
    """`page` under the `URL:` line that opens every page gpt-oss was trained on. Rewraps only that line."""
    head = [*wrap(f"\nURL: {page.url}")]
    text = f"\nURL: {page.url}\n{page.text}"
    return replace(page, text=text, _cache={"lines": [*head, *page.wrapped]})


def neutral(text: str) -> str:
    """`text` without the brackets that mean links and citations to the model, so that a page cannot forge them."""
    return text.translate(_BRACKETS)


def domain_of(url: str) -> str:
    """The host of `url` as links show it, or an empty string."""
    return (urlsplit(url).hostname or "") if "://" in url else ""


def link_text(number: int, text: str, url: str = "", page_url: str = "") -> str:
    """`【number†text†domain】`; the domain is left out for links within the page's own site."""
    text = " ".join(neutral(text).replace("†", "‡").split())
    domain = domain_of(url)
    return f"【{number}†{text}†{domain}】" if domain and domain != domain_of(page_url) else f"【{number}†{text}】"


_WRAPPER = textwrap.TextWrapper(WIDTH, expand_tabs=False, replace_whitespace=False, drop_whitespace=False)


def wrap(text: str) -> list[tuple[str, bool]]:
    """`text` as display lines; whitespace survives, so joined lines give the paragraph back."""
    out: list[tuple[str, bool]] = []
    for paragraph in text.split("\n"):
        parts = _WRAPPER.wrap(paragraph) or [""]
        out.extend((part, index < len(parts) - 1) for index, part in enumerate(parts))
    return out


def estimate_tokens(text: str) -> int:
    """Tokens of `text` without a vocabulary: four ASCII characters or one other character each.

    Measured against o200k on English prose and code this is within about 20 %; the number only sizes a window. A
    server that has the model's tokenizer passes its own counter.
    """
    other = len(_NON_ASCII.findall(text))
    return (len(text) - other + 3) // 4 + other


@dataclass(frozen=True, slots=True)
class Viewer:
    """Renders windows of pages. `tokens` is the budget of a window if the model gave no length."""

    tokens: int = 1024
    count: Callable[[str], int] = estimate_tokens
    max_lines: int = 400

    def show(self, page: Page, cursor: int, start: int = 0, num_lines: int = -1) -> str:
        """The display of `page` from line `start`. Raises UsageError: `start` is behind the last line."""
        lines = page.lines
        if start >= len(lines):
            raise UsageError(f"Invalid location parameter: `{start}`. Cannot exceed page maximum of {len(lines) - 1}.")
        end = self._end(lines, start, num_lines)
        body = "\n".join(f"L{start + i}: {line}" for i, line in enumerate(lines[start:end]))
        title = page.title + (f" ({shorten(unquote(page.url))})" if page.url else "")
        title = " ".join(neutral(title).split())  # a line break in it would forge a display, brackets a citation
        return f"[{cursor}] {title}\n**viewing lines [{start} - {end - 1}] of {len(lines) - 1}**\n\n{body}"

    def _end(self, lines: Sequence[str], start: int, num_lines: int) -> int:
        if num_lines > 0:
            return min(start + min(num_lines, self.max_lines), len(lines))
        used, end = 0, start
        while end < len(lines) and (used < self.tokens or end == start):
            used += self.count(f"L{end}: {lines[end]}\n")
            end += 1
        return end


def shorten(text: str, limit: int = 1024) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def strip_links(lines: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """`lines` with each link replaced by its text. A link may span lines; the number of lines stays the same."""
    joined = "\n".join(line for line, _ in lines)

    def plain(match: re.Match[str]) -> str:
        text = match["text"]
        return text + "\n" * (match[0].count("\n") - text.count("\n"))

    return list(zip(_LINK.sub(plain, joined).split("\n"), (soft for _, soft in lines), strict=True))


def find_lines(page: Page, pattern: str, limit: int, spacing: int) -> list[int]:
    """Lines on which `pattern` begins, ignoring case and line wrapping, at least `spacing` lines apart."""
    needle = pattern.lower()
    found: list[int] = []
    first, text, starts = 0, "", [0]
    for number, (line, soft) in enumerate(strip_links(page.wrapped)):
        text += line.lower()
        if soft:
            starts.append(len(text))
            continue
        at = text.find(needle)
        while at >= 0 and len(found) < limit:
            hit = first + bisect_right(starts, at) - 1
            if not found or hit >= found[-1] + spacing:
                found.append(hit)
            at = text.find(needle, at + max(len(needle), 1))
        first, text, starts = number + 1, "", [0]
    return found


def find_page(page: Page, pattern: str, limit: int = 50, context: int = 4) -> Page:
    """The listing of `pattern`'s matches in `page`, each with `context` lines from where it begins."""
    plain = [line for line, _ in strip_links(page.wrapped)]
    hits = find_lines(page, pattern, limit, context)
    parts, marks, at = [], [], 0
    for number, line in enumerate(hits):
        part = f"# 【{number}†match at L{line}】\n" + "\n".join(plain[line : line + context])
        marks.append((at, number))
        at += len(wrap(part)) + 1
        parts.append(part)
    shown = neutral(pattern)
    return Page(
        url=f"{page.url}/find?pattern={quote(pattern)}",
        title=f"Find results for text: `{shown}` in `{page.title}`",
        text="\n\n".join(parts) if parts else f"No `find` results for pattern: `{shown}`",
        links=[Link(page.url, f"#{n}", line) for n, line in enumerate(hits)],
        source_url=page.source_url or page.url,
        listing=True,
        line_links=marks,
    )
