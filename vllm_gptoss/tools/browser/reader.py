"""Large HTML and any PDF become pages in a process of their own: a hostile file costs that process, not the server.

Parsing holds the interpreter's lock: 0.9 MB of HTML in a thread stopped the server's event loop for up to 0.7 s
(2 loaded cores). A process costs about 0.4 s to start, so small HTML stays in a thread.

Run as `python -m vllm_gptoss.tools.browser.reader KIND URL`: the document on stdin, JSON on stdout.
"""

from __future__ import annotations

import asyncio
import io
import json
import resource
import sys
from typing import Literal

from vllm_gptoss.tools.browser.markup import PageError, html_page
from vllm_gptoss.tools.browser.page import Link, Page, neutral

Kind = Literal["html", "pdf"]

IN_THREAD_CHARS = 50_000
MAX_PAGES = 200
_MEMORY_BYTES = 2 << 30
_CPU_S = 30
_WAIT_S = 30.0

_AT_ONCE = 4
"""Documents read at once; more wait, so that a burst of pages does not take every core from the engine."""


class Reader:
    """Reads documents of one owner, at most four at once."""

    def __init__(self) -> None:
        self._running = asyncio.Semaphore(_AT_ONCE)

    async def html(self, html: str, url: str) -> Page:
        """The page at `url` whose source is `html`, without the `URL:` line.

        Raises:
            PageError: as `html_page`, or it is too slow to read.
        """
        if len(html) <= IN_THREAD_CHARS:
            return await asyncio.to_thread(html_page, html, url, show_url=False)
        return await self._elsewhere("html", url, html.encode("utf-8", "replace"))

    async def pdf(self, data: bytes, url: str) -> Page:
        """The page at `url` that is the PDF `data`, with a heading per page of it.

        Raises:
            PageError: it is broken, encrypted, or too slow to read.
        """
        return await self._elsewhere("pdf", url, data)

    async def _elsewhere(self, kind: Kind, url: str, data: bytes) -> Page:
        async with self._running:
            out = await _child(kind, url, data)
        try:
            answer = json.loads(out)
        except ValueError:
            raise PageError(f"the {kind} could not be read within its memory and time limits") from None
        if error := answer.get("error"):
            raise PageError(f"the {kind} could not be read: {error}")
        links = [Link(target, title) for target, title in answer["links"]]
        return Page(url, answer["title"], answer["text"], links, url)


async def _child(kind: Kind, url: str, data: bytes) -> bytes:
    command = (sys.executable, "-m", __name__, kind, url)
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=null)
    try:
        async with asyncio.timeout(_WAIT_S):
            return (await process.communicate(data))[0]
    except TimeoutError:
        raise PageError(f"the {kind} could not be read within {_WAIT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def pdf_page(data: bytes, url: str) -> Page:
    """The PDF `data`, read in this process.

    Raises:
        PageError: it is broken or encrypted.
    """
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    try:
        reader = PdfReader(io.BytesIO(data))
        title = str((reader.metadata or {}).get("/Title") or "")
        parts = [
            f"## Page {number}\n\n{page.extract_text()}"
            for number, page in enumerate(reader.pages[:MAX_PAGES], start=1)
        ]
        if len(reader.pages) > MAX_PAGES:
            parts.append(f"[cut after {MAX_PAGES} of {len(reader.pages)} pages]")
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PageError(str(error) or type(error).__name__) from error
    return Page(url, neutral(title) or url, neutral("\n\n".join(parts)), source_url=url)


def main() -> None:
    """Reads stdin, answers on stdout."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    kind, url = sys.argv[1:]
    data = sys.stdin.buffer.read()
    answer: dict[str, object]
    try:
        page = pdf_page(data, url) if kind == "pdf" else html_page(data.decode(), url, show_url=False)
        links = [(link.url, link.title) for link in page.links]
        answer = {"title": page.title, "text": page.text, "links": links}
    except PageError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
