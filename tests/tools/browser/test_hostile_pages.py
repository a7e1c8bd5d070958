"""Pages that would stop the server: each costs its own call, while everything else on the event loop goes on.

Every page is small, and every limit is set so that a missing guard fails the test instead of hurting the machine.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import resource
import zlib
from collections.abc import AsyncIterator, Iterator

import pytest
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.loop_watch import shortest_pause
from tests.support.servers import running
from vllm_gptoss.tools.browser import charset, markup, reading, robots_txt
from vllm_gptoss.tools.browser.fetch import Fetcher, FetchError, FetchLimits
from vllm_gptoss.tools.browser.guard import DeniedError, Guard
from vllm_gptoss.tools.browser.page import Page
from vllm_gptoss.tools.browser.reader import Reader
from vllm_gptoss.tools.confined import pool

PAUSE_S = 0.1
MIB = 1 << 20


class Site:
    """Answers every path with what was set for it."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[bytes, dict[str, str]]] = {}

    async def answer(self, request: Request) -> Response:
        body, headers = self.answers.get(request.url.path, (b"", {}))
        status = 302 if "location" in headers else 200 if request.url.path in self.answers else 404
        return Response(body, status, {"content-type": "text/html", **headers})


Made = tuple[Site, str, Fetcher]


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Should a guard be missing, this process runs out of address space before the machine runs out of memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
async def site() -> AsyncIterator[Made]:
    site = Site()
    app = Starlette(routes=[Route("/{path:path}", site.answer)])
    async with running(app) as url:
        fetcher = Fetcher(Guard([url.removeprefix("http://")]), FetchLimits(timeout_s=20.0))
        await pool().start()
        yield site, url, fetcher
        await fetcher.aclose()


async def opened(made: Made, body: bytes, headers: dict[str, str] | None = None, *, source: bool = False) -> Page:
    """The page, opened while the loop is watched."""
    site, url, fetcher = made
    site.answers["/page"] = (body, headers or {})
    pause, (page,) = await shortest_pause(
        lambda: asyncio.gather(fetcher.page(f"{url}/page", source=source), return_exceptions=True), PAUSE_S
    )
    assert pause < PAUSE_S
    if isinstance(page, BaseException):
        raise page
    return page


BLANKS = {
    "text": (b"a" + b" " * 400_000 + b"b", "text/plain"),
    "html": (b"<p>a" + b" " * 400_000 + b"b</p>", "text/html"),
    "pre": (b"<pre>a" + b" \t" * 200_000 + b"b</pre>", "text/html"),
    "spaces in pre": (b"<pre>a" + b" " * 400_000 + b"b</pre>", "text/html"),
    "lines": (b"<p>a" + b" \n" * 200_000 + b"b</p>", "text/html"),
    "cells": (b"<table>" + b"<tr><td> " * 20_000, "text/html"),
    "items": (b"<ol>" + b"<li>a" * 20_000, "text/html"),
}


@pytest.mark.parametrize("name", BLANKS)
async def test_runs_of_blanks_and_items_are_read_in_linear_time(site: Made, name: str) -> None:
    """400 kB of blanks took minutes: `[ \\t]+$` and similar patterns restart at every one."""
    body, kind = BLANKS[name]
    async with asyncio.timeout(25):
        page = await opened(site, body, {"content-type": kind})
    assert "a" in page.text


@pytest.mark.parametrize("encoding", ["gzip, gzip", "gzip,gzip", "deflate, gzip", "br", "zstd", "gzip, identity, gzip"])
async def test_content_is_encoded_once_and_as_was_asked(site: Made, encoding: str) -> None:
    """Two gzips make 1.2 GiB of 1,143 bytes."""
    body = gzip.compress(gzip.compress(bytes(64 * MIB)))
    assert len(body) < 2000
    with pytest.raises(FetchError, match="encoded"):
        await opened(site, body, {"content-encoding": encoding})


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda data: zlib.compressobj(wbits=-15).compress(data) + b""),
    ],
    ids=["gzip", "x-gzip", "deflate", "raw"],
)
async def test_what_unfolds_is_counted_as_it_unfolds(site: Made, encoding: str, pack: object) -> None:
    body = pack(b"word " * (20 * MIB))  # type: ignore[operator]
    page = await opened(site, body, {"content-encoding": encoding, "content-type": "text/plain"})
    assert len(page.text) < 2 * markup.MAX_CHARS
    assert "[page cut after 5000000 bytes]" in page.text


def pdf_of_nested_forms() -> bytes:
    """A PDF of some kilobytes with a text of millions of characters: forms that show forms."""
    writer = PdfWriter()
    page = writer.add_blank_page(300, 300)
    font = DictionaryObject({NameObject("/Type"): NameObject("/Font"), NameObject("/Subtype"): NameObject("/Type1"),
                             NameObject("/BaseFont"): NameObject("/Helvetica")})  # fmt: skip
    fonts = DictionaryObject({NameObject("/F1"): font})
    stream = DecodedStreamObject()
    stream.set_data(b"BT /F1 12 Tf 20 200 Td " + b"(%s ) Tj " % (b"a" * 50) * 20_000 + b"ET")
    page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
    page[NameObject("/Contents")] = writer._add_object(stream.flate_encode())
    for _ in range(3):
        writer.add_page(page)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


async def test_the_text_of_a_pdf_is_cut(site: Made) -> None:
    body = pdf_of_nested_forms()
    assert len(body) < 50_000
    page = await opened(site, body, {"content-type": "application/pdf"})
    assert len(page.text) < markup.MAX_CHARS + 1000
    assert "cut after" in page.text


async def test_the_source_of_a_page_is_cut(site: Made) -> None:
    page = await opened(site, b"x" * 3_000_000, source=True)
    assert len(page.text) < markup.MAX_CHARS + 1000


async def test_titles_links_and_lines_of_a_page_are_bounded(site: Made) -> None:
    base = "http://a.example/" + "b" * 100_000
    many = b"".join(b"<a href=/%d>l</a><br>" % number for number in range(20_000))
    body = f"<title>{'t' * 100_000}</title><base href='{base}'>".encode() + b"<a href=x>l</a>" * 2000
    page = await opened(site, body)
    assert len(page.title) <= reading.MAX_TITLE
    assert all(len(link.url) <= markup.MAX_URL for link in page.links)
    page = await opened(site, many)
    assert len(page.links) == markup.MAX_LINKS
    page = await opened(site, b"a\n" * 200_000, {"content-type": "text/plain"})
    assert len(page.lines) == reading.MAX_LINES + 2
    assert page.lines[-1] == "[page cut after 50000 lines]"


async def test_what_a_parser_does_not_survive_is_told(site: Made) -> None:
    with pytest.raises(FetchError, match="nested too deeply"):
        await opened(site, b"<div>" * 20_000)


@pytest.mark.parametrize(
    "number", ["²", "9" * 5000, "-1", "", "१"], ids=["raised", "long", "negative", "none", "hindi"]
)
async def test_a_number_that_is_none_costs_no_page(site: Made, number: str) -> None:
    """`int` does not read all that is numeric."""
    body = f"<ol start='{number}'><li>first</ol><table><tr><td colspan='{number}' rowspan='{number}'>cell</table>"
    text = (await opened(site, body.encode(), {"content-type": "text/html; charset=utf-8"})).text
    assert "1. first" in text
    assert "cell" in text


@pytest.mark.parametrize(
    "host",
    ["xn--0", "xn--a", "a..b", ".com", "a" * 64 + ".com", "a" * 300, "\u2488com", "[::1", "b\u00fc" * 60 + ".de"],
)
async def test_a_host_that_is_no_name_is_an_answer(site: Made, host: str) -> None:
    """IDNAError and what Python's own codec raises are no OSError: opened directly, in a link, and redirected to."""
    served, url, fetcher = site
    with pytest.raises((DeniedError, FetchError)):
        await Fetcher(respect_robots=False).page(f"http://{host}/")
    served.answers["/to"] = (b"", {"location": f"http://{host}/".encode().decode("latin-1")})
    with pytest.raises((DeniedError, FetchError)):
        await fetcher.page(f"{url}/to")
    assert "link" in (await opened(site, f"<a href='http://{host}/x'>link</a>".encode())).text


ROBOTS = {
    "agents": "\n".join([*(f"User-agent: a{n}" for n in range(3000)), *(f"Disallow: /{n}" for n in range(3000))]),
    "wildcards": "User-agent: *\n" + "\n".join("Disallow: /" + "*a" * 50 + str(n) for n in range(2000)),
    "ours": "\n".join(f"User-agent: {'v*' * n}" for n in range(1, 1500)) + "\n" + "Disallow: /x\n" * 3000,
}  # fmt: skip


@pytest.mark.parametrize("name", ROBOTS)
async def test_a_hostile_robots_txt_costs_only_its_site(site: Made, name: str) -> None:
    """3,000 agents with 3,000 rules took 36 s and 624 MiB on the event loop."""
    served, _, _ = site
    served.answers["/robots.txt"] = (ROBOTS[name].encode(), {"content-type": "text/plain"})
    assert "x" in (await opened(site, b"<p>x")).text


async def test_a_robots_txt_that_cannot_be_read_closes_its_site(site: Made) -> None:
    served, url, fetcher = site
    served.answers["/robots.txt"] = (gzip.compress(b"x"), {"content-encoding": "gzip, gzip"})
    with pytest.raises(DeniedError, match="cannot be read"):
        await fetcher.page(f"{url}/page")


@pytest.mark.parametrize(
    ("text", "url", "allowed"),
    [
        ("User-agent: *\nDisallow: /a", "/a", False),
        ("User-agent: other\nDisallow: /", "/a", True),
        ("User-agent: other\nUser-agent: vllm-gptoss\nDisallow: /a", "/a", False),
        ("User-agent: vllm-gptoss\nAllow: /a\nUser-agent: *\nDisallow: /", "/a", True),
        ("User-agent: other\nDisallow: /\nUser-agent: vllm-gptoss\nAllow: /\nDisallow: /a$", "/a", False),
        ("user agent VLLM-GPTOSS\nDisallow: /a", "/a", False),
        ("User-agent: vllm-gptoss # us\nSitemap: https://a.example/s\nUser-agent: x\nDisallow: /a", "/a", False),
        ("Disallow: /a", "/a", True),
        ("", "/a", True),
    ],
)
def test_only_groups_that_concern_nobody_here_are_left_out(text: str, url: str, allowed: bool) -> None:
    said = robots_txt.verdict(text.encode(), encoding="", agent="vllm-gptoss", url=f"http://a.example{url}")
    assert said.allowed is allowed
    again = robots_txt.verdict(said.rules.encode(), encoding="", agent="vllm-gptoss", url=f"http://a.example{url}")
    assert again == said


@pytest.mark.parametrize(
    "label", ["punycode", "idna", "unicode_escape", "rot13", "utf-7", "utf_8_sig", "zlib", "mbcs", "no-such"]
)
async def test_only_charsets_of_the_web_are_known(site: Made, label: str) -> None:
    """480 kB took punycode 9 s, in a thread that nothing could stop."""
    assert charset.codec(label) is None
    body = b"caf\xc3\xa9 " * 60_000
    for headers, head in (
        ({"content-type": f"text/html; charset={label}"}, b""),
        ({}, b"<meta charset=%s>" % label.encode()),
    ):
        assert "café" in (await opened(site, head + body, headers)).text


@pytest.mark.parametrize(
    ("label", "codec"), [("latin1", "cp1252"), ("Shift_JIS", "cp932"), (" UTF8 ", "utf-8"), ("x-gbk", "gbk")]
)
def test_charsets_mean_what_browsers_mean(label: str, codec: str) -> None:
    assert charset.codec(label) == codec


@pytest.mark.alone
async def test_finding_in_a_hostile_page_does_not_hold_up_the_server() -> None:
    page = Page("http://a.example/", "t", "a" * 900_000)
    lines = page.wrapped
    assert lines
    await pool().start()
    pause, found = await shortest_pause(lambda: Reader().find(page, "a"), PAUSE_S)
    assert pause < PAUSE_S
    assert len(found.links) == 50


@pytest.mark.alone
async def test_many_hostile_pages_at_once_leave_the_loop_running(site: Made) -> None:
    made, url, fetcher = site
    for name, (body, kind) in BLANKS.items():
        made.answers[f"/{name}"] = (body, {"content-type": kind})
    made.answers["/deep"] = (b"<div>" * 20_000, {})
    names = [*BLANKS, "deep"]
    pause, done = await shortest_pause(
        lambda: asyncio.gather(*(fetcher.page(f"{url}/{name}") for name in names), return_exceptions=True), PAUSE_S
    )
    assert pause < PAUSE_S
    assert all(isinstance(one, (Page, FetchError)) for one in done)
