"""HTML to the text gpt-oss reads: Markdown without emphasis, links numbered in the order they appear.

markdownify walks the tree; this file decides what a link, an image and a hidden element become.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from typing import Any
from urllib.parse import urljoin, urlsplit

import lxml.etree  # noqa: F401  bs4 imports its parser only when it reads a page, in a worker
from bs4 import BeautifulSoup, Comment, Tag, XMLParsedAsHTMLWarning
from bs4.element import NavigableString
from markdown_it import MarkdownIt
from markdownify import MarkdownConverter

from vllm_gptoss.tools.browser.page import Link, Page, domain_of, link_text, neutral
from vllm_gptoss.tools.confined.jobs import Refused

MAX_CHARS = 1_000_000
"""Longer documents are cut: parsing is Python and holds a worker thread, 2.3 s for a million characters."""

MAX_LINKS = 10_000
MAX_URL = 8192
"""Links beyond the first `MAX_LINKS` become text. A link may be as long as the page's base and itself together."""

warnings.filterwarnings("ignore", category=XMLParsedAsHTMLWarning)  # XHTML is read as HTML, and well enough

_CUT = f"\n\n[page cut after {MAX_CHARS} characters of source]"
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
_DROPPED = ["script", "style", "noscript", "template", "svg", "math", "iframe", "canvas", "head", "object"]
_HIDDEN = re.compile(r"display:\s*none|visibility:\s*hidden", re.IGNORECASE)
_UNNAMED_IMAGES = re.compile(r"(\[Image \d+\] ?)+")
_SCRIPT = re.compile(r"[\w-]+")
_NUMBERS = ("start", "colspan", "rowspan")
_NUMBER = re.compile(r"[0-9]{1,4}")
_BLANKS = re.compile(r"\n{2,}")
_SPACES = re.compile(r"[\t ]{2,}")


class PageError(Refused):
    """A document could not be read; the message has the reason."""


class _Converter(MarkdownConverter):  # type: ignore[misc]
    """Markdown with gpt-oss's link brackets. Collects `links` as it goes."""

    def __init__(self, url: str, base: str) -> None:
        super().__init__(
            heading_style="ATX",
            bullets="*",
            strip=["b", "strong", "i", "em", "u", "s", "del", "mark"],
            escape_asterisks=False,
            escape_underscores=False,
            escape_misc=False,
            strip_pre=None,
        )
        self.url = url
        self.base = base
        self.links: list[Link] = []
        self._numbers: dict[str, int] = {}
        self._images = 0
        self._list_items: Counter[int] = Counter()  # converted so far, by the id of their list

    def process_text(self, el: Any, parent_tags: set[str] | None = None) -> str:
        """Text nodes, with entities already decoded: brackets become neutral, line breaks outside `pre` are spaces."""
        parent: Any = super()
        if "pre" not in (parent_tags or ()) and _SPACES.search(el):
            # markdownify looks for a line break behind every blank of a run: quadratic. One blank shows the same.
            short = NavigableString(_SPACES.sub(" ", el))
            el.replace_with(short)
            el = short
        text = neutral(parent.process_text(el, parent_tags=parent_tags))
        return text if "pre" in (parent_tags or ()) or not text.strip() else text.replace("\n", " ")

    def convert_a(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        """A link to another page becomes `【n†text†domain】`; one within the page is only its text."""
        href = str(el.get("href") or "").strip()
        label = " ".join(text.split())
        if not label or not href or href.startswith("#") or _UNNAMED_IMAGES.fullmatch(label):
            return text
        target = _absolute(self.base, href)
        if target is None or len(self.links) >= MAX_LINKS:
            return text
        number = self._numbers.setdefault(target, len(self.links))
        if number == len(self.links):
            self.links.append(Link(target, label))
        return link_text(number, label, target, self.url)

    def convert_img(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        number, self._images = self._images, self._images + 1
        name = " ".join(str(el.get("alt") or el.get("title") or "").split())
        return f"[Image {number}: {neutral(name)}]" if name else f"[Image {number}]"

    def convert_li(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        """markdownify counts the items before each item of a list, which is quadratic; here they are counted once."""
        before = self._list_items[id(el.parent)]
        self._list_items[id(el.parent)] += 1
        el.find_previous_siblings = lambda name: range(before)  # type: ignore[assignment]
        parent: Any = super()
        return str(parent.convert_li(el, text, parent_tags))

    def convert_pre(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        """Without empty lines around it; markdownify's `[ \\n]*$` is quadratic in a run of blanks."""
        inner = text.lstrip(" \n")
        blanks = text[: len(text) - len(inner)]
        text = (blanks[blanks.rfind("\n") + 1 :] + inner).rstrip(" \n")
        parent: Any = super()
        return str(parent.convert_pre(el, text, parent_tags))

    def convert_sup(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        return f"^{{{text}}}" if _SCRIPT.fullmatch(text) else text

    def convert_sub(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        return f"_{{{text}}}" if _SCRIPT.fullmatch(text) else text


def _absolute(base: str, href: str) -> str | None:
    if len(base) + len(href) > MAX_URL:
        return None
    try:
        target = urljoin(base, href)
        scheme = urlsplit(target).scheme
    except ValueError:
        return None
    return target.split("#", 1)[0] if scheme in ("http", "https", "file") else None


def _prune(soup: BeautifulSoup) -> None:
    for comment in soup.find_all(string=lambda text: isinstance(text, Comment)):
        comment.extract()
    for tag in soup.find_all(_DROPPED):
        tag.decompose()
    for tag in soup.find_all(_is_hidden):
        if not tag.decomposed:
            tag.decompose()
    for tag in soup.find_all(["ol", "td", "th"]):
        for name in _NUMBERS:  # markdownify takes `²`, which is no int, for one, and any length
            if tag.has_attr(name) and not _NUMBER.fullmatch(str(tag[name])):
                del tag[name]


def _is_hidden(tag: Any) -> bool:
    return bool(
        tag.has_attr("hidden") or tag.get("aria-hidden") == "true" or _HIDDEN.search(str(tag.get("style") or ""))
    )


def _base(soup: BeautifulSoup, url: str) -> str:
    found = soup.find("base", href=True)
    return (_absolute(url, str(found["href"])) if isinstance(found, Tag) else None) or url


def _title(soup: BeautifulSoup, url: str) -> str:
    found = soup.find("title") or soup.find("h1")
    title = " ".join(found.get_text(" ").split()) if isinstance(found, Tag) else ""
    return neutral(title) or domain_of(url) or url


def tidy(text: str) -> str:
    """`text` without trailing blanks or runs of empty lines; `[ \\t]+$` would be quadratic in a run of blanks."""
    return _BLANKS.sub("\n\n", "\n".join(line.rstrip(" \t") for line in text.split("\n"))).strip()


def cut_text(text: str) -> str:
    """`text` up to `MAX_CHARS`, with a note where that is not all."""
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + _CUT


def html_page(html: str, url: str, title: str | None = None) -> Page:
    """The page at `url` with the source `html`. Raises PageError: the document is empty or nested too deeply."""
    soup = BeautifulSoup(html[:MAX_CHARS], "lxml")
    name = title or _title(soup, url)
    try:
        converter = _Converter(url, _base(soup, url))
        _prune(soup)
        text = tidy(converter.convert_soup(soup))
    except RecursionError:
        raise PageError("the page's elements are nested too deeply to read") from None
    if len(html) > MAX_CHARS:
        text += _CUT
    return Page(url=url, title=name, text=text, links=converter.links, source_url=url)


def text_page(text: str, url: str, title: str | None = None) -> Page:
    """The page at `url` that is plain text or Markdown already."""
    body = tidy(neutral(text[:MAX_CHARS].expandtabs(4).replace("\r\n", "\n").replace("\r", "\n")))
    if len(text) > MAX_CHARS:
        body += _CUT
    return Page(url=url, title=title or first_line(body) or url, text=body, source_url=url)


def markdown_page(text: str, url: str, title: str | None = None) -> Page:
    """The page at `url` that is Markdown; its links become numbered ones. Raises PageError: as `html_page`."""
    html = str(_MARKDOWN.render(text[:MAX_CHARS]))  # HTML in it is shown and not understood
    return html_page(html, url, title or first_line(text) or None)


def first_line(text: str) -> str:
    return text.lstrip().split("\n", 1)[0].lstrip("# ").strip()[:120]
