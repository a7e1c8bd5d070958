"""Documents of the web as display lines: the jobs of confined workers. Nothing here runs in the server's process."""

from __future__ import annotations

import contextlib
import encodings
import importlib
import io
import pkgutil
from dataclasses import dataclass, replace

import msgspec
import pypdf
from pypdf.errors import PyPdfError

from vllm_gptoss.tools.browser.charset import text_of
from vllm_gptoss.tools.browser.markup import MAX_CHARS, cut_text, html_page, markdown_page, text_page
from vllm_gptoss.tools.browser.page import Link, Page, find_page, neutral, shorten, under_url
from vllm_gptoss.tools.confined.content import undone
from vllm_gptoss.tools.confined.jobs import Refused, job

MAX_LINES = 50_000
MAX_TITLE = 300
"""Limits of a `Document`. A page of a million characters has 12,500 full lines."""

MAX_PDF_PAGES = 200
_TEXT_TYPES = ("application/json", "application/xml", "application/yaml", "application/x-ndjson", "application/ld+json")


@dataclass
class Document:
    """The worker's result: a page's display lines (`soft`: 1 if the next line continues this one) and its links."""

    title: str
    lines: list[str]
    soft: bytes
    links: list[tuple[str, str, int | None]]
    marks: list[tuple[int, int]]


@job
def read(
    payload: bytes, *, url: str, content_type: str, encoding: str, max_bytes: int, cut: bool, source: bool
) -> Document:
    """An answer's body, cut after `max_bytes` of content. `cut`: it was already, as it came."""
    body, more = undone(payload, encoding, max_bytes)
    kind, _, parameters = content_type.partition(";")
    page = _page(body, url, kind.strip().lower() or "text/html", _charset(parameters), source=source)
    if cut or more:
        page = replace(page, text=f"{page.text}\n\n[page cut after {max_bytes} bytes]", _cache={})
    return _document(page)


@job
def read_html(payload: bytes, *, url: str) -> Document:
    """HTML in UTF-8, without the `URL:` line."""
    return _document(html_page(payload.decode("utf-8", "replace"), url))


@job
def read_markdown(payload: bytes, *, url: str) -> Document:
    """Markdown in UTF-8, without the `URL:` line."""
    return _document(markdown_page(payload.decode("utf-8", "replace"), url))


@job
def read_pdf(payload: bytes, *, url: str) -> Document:
    """A PDF, without the `URL:` line."""
    return _document(pdf_page(payload, url))


@job
def find(payload: bytes, *, url: str, title: str, source_url: str, pattern: str) -> Document:
    """The matches of `pattern` in a page with the lines `payload`, as `packed` makes them."""
    lines = msgspec.msgpack.decode(payload, type=list[tuple[str, bool]])
    text = "".join(line if soft else f"{line}\n" for line, soft in lines)[:-1]
    return _document(find_page(Page(url, title, text, source_url=source_url, _cache={"lines": lines}), pattern))


def packed(page: Page) -> bytes:
    return msgspec.msgpack.encode(page.wrapped)


def page_of(document: Document, url: str, source_url: str = "", *, listing: bool = False) -> Page:
    """The server's side: the page at `url` that a worker read."""
    lines = [(line, bool(soft)) for line, soft in zip(document.lines, document.soft, strict=True)]
    text = "".join(line if soft else f"{line}\n" for line, soft in lines)[:-1]
    links = [Link(target, title, line) for target, title, line in document.links]
    shown = source_url or url
    return Page(url, document.title, text, links, shown, listing, document.marks or (), {"lines": lines})


def _document(page: Page) -> Document:
    wrapped = page.wrapped
    if len(wrapped) > MAX_LINES:
        wrapped = [*wrapped[:MAX_LINES], ("", False), (f"[page cut after {MAX_LINES} lines]", False)]
    return Document(
        shorten(" ".join(page.title.split()), MAX_TITLE),
        [line for line, _ in wrapped],
        bytes(soft for _, soft in wrapped),
        [(link.url, shorten(link.title, MAX_TITLE), link.line) for link in page.links],
        list(page.line_links),
    )


def _charset(parameters: str) -> str | None:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip("\"'")
    return None


def _page(body: bytes, url: str, kind: str, charset: str | None, *, source: bool) -> Page:
    if kind == "application/pdf" or body.startswith(b"%PDF-"):
        return under_url(pdf_page(body, url))
    text = text_of(body, charset)
    if source:
        shown = f"view-source:{url}"
        return Page(shown, shown, neutral(cut_text(text)), source_url=url)
    if kind in ("text/html", "application/xhtml+xml"):
        return under_url(html_page(text, url))
    if kind.startswith("text/") or kind in _TEXT_TYPES or kind.endswith(("+json", "+xml")):
        return under_url(text_page(text, url))
    raise Refused(f"its type, {kind[:80]}, cannot be shown as text")


def pdf_page(data: bytes, url: str) -> Page:
    """The PDF `data`, with a heading per page of it, cut as HTML is. Raises Refused: it is broken or encrypted."""
    parts: list[str] = []
    room = MAX_CHARS
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        title = str((reader.metadata or {}).get("/Title") or "")
        for number, page in enumerate(reader.pages[:MAX_PDF_PAGES], start=1):
            parts.append(f"## Page {number}\n\n{page.extract_text()}")
            room -= len(parts[-1])
            if room < 0:
                break
        if room >= 0 and len(reader.pages) > MAX_PDF_PAGES:
            parts.append(f"[cut after {MAX_PDF_PAGES} of {len(reader.pages)} pages]")
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:
        raise Refused(f"the pdf could not be read: {str(error)[:200] or type(error).__name__}") from None
    return Page(url, neutral(title) or url, neutral(cut_text("\n\n".join(parts))), source_url=url)


def warm() -> None:
    """Everything a job would import or open later, when it no longer can."""
    for module in pkgutil.iter_modules(encodings.__path__):
        if module.name not in ("mbcs", "oem"):  # Windows' own
            importlib.import_module(f"encodings.{module.name}")
    for module in pkgutil.walk_packages(pypdf.__path__, "pypdf."):
        with contextlib.suppress(ImportError):  # what needs a package that is not there
            importlib.import_module(module.name)
    text_of("Größe und Maß, déjà vu, наконец-то".encode("cp1251", "replace") * 8, None)
    rehearse()


def rehearse() -> None:
    html = "<title>t</title><h1>h</h1><p>a <a href=/x>b</a><ul><li>i</ul><table><tr><td>c</table><pre> d\n</pre>"
    body = html.encode() * 4
    url = "http://a.example/"
    msgspec.msgpack.encode(
        read(body, url=url, content_type="text/html", encoding="", max_bytes=1 << 20, cut=False, source=False)
    )
