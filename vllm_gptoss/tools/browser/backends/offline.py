"""An index over a folder of documents: SQLite's FTS5 ranks them by BM25, and pages come from memory, never a socket.

It is what answers when no search key is set, what `external_web_access: false` leaves, and what the tests use.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import yaml
from bs4 import BeautifulSoup, Tag

from vllm_gptoss.tools.browser.backends.base import Backend, BackendError, Hit, Query
from vllm_gptoss.tools.browser.fetch import domain_allowed
from vllm_gptoss.tools.browser.markup import PageError, markdown_page, text_page
from vllm_gptoss.tools.browser.page import Page, strip_links
from vllm_gptoss.tools.browser.reader import Reader

logger = logging.getLogger(__name__)

SUFFIXES = (".html", ".htm", ".md", ".txt", ".pdf")
MAX_DOCUMENTS = 20_000
MAX_BYTES = 20_000_000

_FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---\r?\n", re.DOTALL)
_WORD = re.compile(r"\w+")
_STOP = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be by can do does for from how i in is it of on or that the this to was what when where "
        "which who why will with",
    )
)
_SEARCH = """
SELECT url, title, snippet(documents, 2, '', '', ' … ', 32) FROM documents
WHERE documents MATCH ? ORDER BY bm25(documents, 0.0, 4.0, 1.0), url LIMIT ?
"""


class Offline(Backend):
    """The documents under `folder`.

    A document's URL is the one it declares (`url:` in Markdown front matter, `<link rel="canonical">` in HTML), else
    `prefix` and its path in the folder. Its lines are its own: the `URL:` lines of fetched pages are left out.
    """

    name = "offline"

    def __init__(self, folder: Path, prefix: str = "file:///") -> None:
        self.folder = folder
        self._prefix = prefix if prefix.endswith("/") else prefix + "/"
        self._pages: dict[str, Page] = {}
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._lock = threading.Lock()
        self._reader = Reader()

    async def start(self) -> None:
        """Reads and indexes the folder. Raises BackendError: there is no such folder, or nothing in it can be read."""
        if not self.folder.is_dir():
            raise BackendError(f"the documents folder {self.folder} does not exist")
        paths = await asyncio.to_thread(lambda: list(self._paths()))
        documents = []
        for path in paths[:MAX_DOCUMENTS]:
            try:
                documents.append(await self._read(path))
            except (OSError, PageError, BackendError) as error:
                logger.warning("browser: %s is not indexed: %s", path, error)
        if len(paths) > MAX_DOCUMENTS:
            logger.warning("browser: only the first %d documents of %s are indexed", MAX_DOCUMENTS, self.folder)
        if not documents:
            raise BackendError(f"no document ({', '.join(SUFFIXES)}) in {self.folder} could be read")
        await asyncio.to_thread(self._index, documents)
        logger.info("browser: indexed %d documents of %s", len(documents), self.folder)

    def _paths(self) -> Iterator[Path]:
        root = self.folder.resolve()
        for path in sorted(self.folder.rglob("*")):
            # A link out of the folder would publish what the operator did not put there.
            if path.suffix.lower() in SUFFIXES and path.is_file() and path.resolve().is_relative_to(root):
                yield path

    async def _read(self, path: Path) -> Page:
        url = self._prefix + quote(path.relative_to(self.folder).as_posix())
        data = await asyncio.to_thread(_bytes, path)
        if path.suffix.lower() == ".pdf":
            page = await self._reader.pdf(data, url)
            return page if page.title != url else replace(page, title=path.stem)
        text = data.decode("utf-8", "replace").removeprefix("\ufeff")
        if path.suffix.lower() in (".html", ".htm"):
            return await self._reader.html(text, _canonical(text) or url)
        meta, body = _front_matter(text)
        url = str(meta.get("url") or url)
        title = str(meta["title"]) if meta.get("title") else None
        make = markdown_page if path.suffix.lower() == ".md" else text_page
        return await asyncio.to_thread(make, body, url, title)

    def _index(self, documents: Sequence[Page]) -> None:
        with self._lock:
            self._db.execute(
                "CREATE VIRTUAL TABLE documents USING fts5(url UNINDEXED, title, body, tokenize='porter unicode61')"
            )
            for document in documents:
                if document.url in self._pages:
                    logger.warning("browser: two documents declare the URL %s; the first is used", document.url)
                    continue
                self._pages[document.url] = document
                body = "\n".join(line for line, _ in strip_links(document.wrapped))
                self._db.execute("INSERT INTO documents VALUES (?, ?, ?)", (document.url, document.title, body))

    async def search(self, query: Query) -> Sequence[Hit]:
        """BM25 over title (four times) and text, any word of the query counting."""
        said = _WORD.findall(query.text.lower())
        words = [word for word in said if word not in _STOP] or said
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in dict.fromkeys(words))
        rows = await asyncio.to_thread(self._query, match, len(self._pages) if query.domains else query.topn)
        found = (Hit(title, url, " ".join(snippet.split())) for url, title, snippet in rows)
        return [hit for hit in found if domain_allowed(hit.url, query.domains)][: query.topn]

    def _query(self, match: str, limit: int) -> list[tuple[str, str, str]]:
        with self._lock:
            return self._db.execute(_SEARCH, (match, limit)).fetchall()

    async def page(self, url: str) -> Page | None:
        """The document at `url`, with or without a fragment or final slash."""
        bare = url.split("#", 1)[0]
        return self._pages.get(bare) or self._pages.get(bare.rstrip("/")) or self._pages.get(bare + "/")

    async def aclose(self) -> None:
        with self._lock:
            self._db.close()


def _bytes(path: Path) -> bytes:
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise BackendError(f"{size} bytes are more than {MAX_BYTES}")
    return path.read_bytes()


def _front_matter(text: str) -> tuple[dict[str, object], str]:
    match = _FRONT_MATTER.match(text)
    if match is None:
        return {}, text
    try:
        meta = yaml.safe_load(match[1])
    except yaml.YAMLError:
        return {}, text
    return (meta, text[match.end() :]) if isinstance(meta, dict) else ({}, text)


def _canonical(html: str) -> str | None:
    link = BeautifulSoup(html[:100_000], "lxml").find("link", rel="canonical", href=True)
    return str(link["href"]) if isinstance(link, Tag) else None
