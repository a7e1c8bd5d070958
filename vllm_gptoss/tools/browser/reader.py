"""Documents become pages in confined workers (`reading`); this is the server's side, which parses nothing."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, replace
from urllib.parse import quote

from vllm_gptoss.tools.browser import reading
from vllm_gptoss.tools.browser.markup import PageError
from vllm_gptoss.tools.browser.page import Page
from vllm_gptoss.tools.confined import BusyError, ConfinedError, Limit, Refused, pool

LIMIT = Limit(seconds=30.0, cpu_s=15, memory=1 << 30)


@dataclass(frozen=True, slots=True)
class Body:
    """An answer as it came: still encoded, whether for transport (`encoding`) or as text (`content_type`)."""

    data: bytes
    content_type: str = ""
    encoding: str = ""
    cut: bool = False  # there was more


class Reader:
    """Reads documents of any origin. Every method raises PageError: broken, encrypted, too slow, too large."""

    async def body(self, body: Body, url: str, max_bytes: int, *, source: bool = False) -> Page:
        """The page at `url`, or its source text, from at most `max_bytes` of content."""
        document = await _read(
            pool().run(
                reading.read,
                body.data,
                LIMIT,
                url=url,
                content_type=body.content_type,
                encoding=body.encoding,
                max_bytes=max_bytes,
                cut=body.cut,
                source=source,
            )
        )
        shown = f"view-source:{url}" if source else url
        return reading.page_of(document, shown, url)

    async def html(self, html: str, url: str) -> Page:
        """The page at `url` with the source `html`, without the `URL:` line."""
        data = html.encode("utf-8", "replace")
        return reading.page_of(await _read(pool().run(reading.read_html, data, LIMIT, url=url)), url)

    async def markdown(self, text: str, url: str) -> Page:
        """The page at `url` that is Markdown, without the `URL:` line."""
        data = text.encode("utf-8", "replace")
        return reading.page_of(await _read(pool().run(reading.read_markdown, data, LIMIT, url=url)), url)

    async def pdf(self, data: bytes, url: str) -> Page:
        """The page at `url` that is the PDF `data`, with a heading per page of it, without the `URL:` line."""
        return reading.page_of(await _read(pool().run(reading.read_pdf, data, LIMIT, url=url)), url)

    async def find(self, page: Page, pattern: str) -> Page:
        """The listing of `pattern`'s matches in `page`, as `page.find_page` makes it."""
        document = await _read(
            pool().run(
                reading.find,
                reading.packed(page),
                LIMIT,
                url=page.url,
                title=page.title,
                source_url=page.source_url,
                pattern=pattern,
            )
        )
        found = reading.page_of(document, f"{page.url}/find?pattern={quote(pattern)}", listing=True)
        return replace(found, source_url=page.source_url or page.url)


async def _read(work: Awaitable[reading.Document]) -> reading.Document:
    try:
        return await work
    except Refused as error:
        raise PageError(str(error)) from None
    except (ConfinedError, BusyError) as error:
        raise PageError(f"the document could not be read: {error}") from None
