"""A page from a real local web server: its kinds, its limits, and its robots.txt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.responses.pdf import pdf
from tests.support.servers import running
from vllm_gptoss.tools.browser.fetch import Fetcher, FetchError, FetchLimits
from vllm_gptoss.tools.browser.guard import DeniedError, Guard
from vllm_gptoss.tools.browser.markup import html_page
from vllm_gptoss.tools.browser.page import under_url


class Site:
    """Answers of the local server, by path."""

    def __init__(self) -> None:
        self.robots: tuple[int, str] = (404, "")
        self.asked: list[str] = []
        self.agents: set[str] = set()
        self.hung = asyncio.Event()

    async def answer(self, request: Request) -> Response:
        path = request.url.path
        self.asked.append(path)
        self.agents.add(request.headers["user-agent"])
        if path == "/robots.txt":
            return PlainTextResponse(self.robots[1], self.robots[0])
        if path == "/hang":
            await self.hung.wait()
        if path == "/endless":
            return StreamingResponse(self.endless(), media_type="text/plain")
        bodies: dict[str, tuple[bytes, str]] = {
            "/page": (b"<title>T</title><p>caf\xe9</p>", "text/html; charset=iso-8859-1"),
            "/meta": ('<meta charset="shift_jis"><p>日本</p>'.encode("shift_jis"), "text/html"),
            "/header": ("<p>日本</p>".encode("shift_jis"), "text/html; charset=shift_jis"),
            "/undeclared": (b"<p>caf\xe9</p>", "text/html"),
            "/bogus": ("<p>café</p>".encode(), "text/html; charset=no-such"),
            "/utf16": ("<p>café</p>".encode("utf-16"), "text/html"),
            "/base": (b"<base href='/elsewhere/'><a href=x>l</a>", "text/html"),
            "/text": (b"one\r\ntwo", "text/plain"),
            "/json": (b'{"a": 1}', "application/json"),
            "/pdf": (pdf("Close the inlet valve", "Second page", title="Pump manual"), "application/pdf"),
            "/broken.pdf": (b"%PDF-1.7 nothing", "application/pdf"),
            "/binary": (b"\x00\x01", "application/octet-stream"),
            "/empty": (b"", "text/html"),
        }
        if path == "/cookie":
            answer = PlainTextResponse(request.headers.get("cookie", "no cookie"))
            answer.set_cookie("session", "alice")
            return answer
        if path == "/wall" and not request.cookies:  # requires a cookie
            wall = RedirectResponse("/wall")
            wall.set_cookie("seen", "yes")
            return wall
        if path == "/wall":
            return PlainTextResponse("behind the wall")
        if path == "/gzip":
            return Response(b"not gzip", headers={"content-type": "text/html", "content-encoding": "gzip"})
        if path not in bodies:
            return PlainTextResponse("no", 404)
        return Response(bodies[path][0], headers={"content-type": bodies[path][1]})

    async def endless(self) -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1000 + b"\n"
            await asyncio.sleep(0)  # uvicorn's send does not suspend once the client has gone


@pytest.fixture
async def site() -> AsyncIterator[tuple[Site, str, Fetcher]]:
    site = Site()
    app = Starlette(routes=[Route("/{path:path}", site.answer)])
    async with running(app) as url:
        host = url.removeprefix("http://")
        fetcher = Fetcher(Guard([host]), FetchLimits(max_bytes=50_000, timeout_s=5.0))
        yield site, url, fetcher
        site.hung.set()
        await fetcher.aclose()


Made = tuple[Site, str, Fetcher]


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        ("/page", ["café"]),
        ("/meta", ["日本"]),
        ("/header", ["日本"]),
        ("/undeclared", ["café"]),
        ("/bogus", ["café"]),
        ("/utf16", ["café"]),
        ("/wall", ["behind the wall"]),
        ("/text", ["one", "two"]),
        ("/json", ['{"a": 1}']),
        ("/pdf", ["## Page 1", "", "Close the inlet valve", "", "## Page 2", "", "Second page"]),
        ("/empty", [""]),
    ],
)
async def test_each_kind_of_page_becomes_text(site: Made, path: str, lines: list[str]) -> None:
    _, url, fetcher = site
    page = await fetcher.page(url + path)
    assert page.lines == ["", f"URL: {url}{path}", *lines]


async def test_a_page_is_the_same_wherever_it_is_read(site: Made) -> None:
    _, url, fetcher = site
    page = await fetcher.page(url + "/page")
    here = under_url(html_page("<title>T</title><p>café</p>", url + "/page"))
    assert page == here
    assert page.wrapped == here.wrapped


async def test_one_conversations_cookies_are_not_sent_for_another(site: Made) -> None:
    _, url, fetcher = site
    for _ in range(2):
        assert (await fetcher.page(f"{url}/cookie")).lines[-1] == "no cookie"


async def test_titles_links_and_the_source_are_those_of_the_page(site: Made) -> None:
    _, url, fetcher = site
    assert [link.url for link in (await fetcher.page(f"{url}/base")).links] == [f"{url}/elsewhere/x"]
    assert (await fetcher.page(url + "/pdf")).title == "Pump manual"
    assert (await fetcher.page(url + "/page")).title == "T"
    assert (await fetcher.page(url + "/page", source=True)).text == "<title>T</title><p>café</p>"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/none", "404"),
        ("/binary", "cannot be shown"),
        ("/gzip", "decompress"),
        ("/broken.pdf", "pdf could not be read"),
    ],
)
async def test_what_cannot_be_read_says_why(site: Made, path: str, said: str) -> None:
    _, url, fetcher = site
    with pytest.raises(FetchError, match=said):
        await fetcher.page(url + path)


async def test_an_endless_page_is_cut(site: Made) -> None:
    _, url, fetcher = site
    page = await fetcher.page(url + "/endless")
    assert len(page.text) < 51_000
    assert page.lines[-1] == "[page cut after 50000 bytes]"


async def test_a_page_that_never_answers_is_given_up(site: Made) -> None:
    _, url, _ = site
    fetcher = Fetcher(Guard([url.removeprefix("http://")]), FetchLimits(timeout_s=0.3))
    with pytest.raises(FetchError, match=r"no complete answer|ReadTimeout"):
        await fetcher.page(url + "/hang")
    await fetcher.aclose()


async def test_robots_txt_is_asked_once_and_honoured(site: Made) -> None:
    served, url, fetcher = site
    served.robots = (200, "User-agent: vllm-gptoss\nDisallow: /page\n\nUser-agent: *\nAllow: /")
    with pytest.raises(DeniedError, match=r"robots\.txt does not allow"):
        await fetcher.page(url + "/page")
    await fetcher.page(url + "/text")
    assert served.asked == ["/robots.txt", "/text"]
    assert all(agent.startswith("vllm-gptoss/") for agent in served.agents)


async def test_a_site_with_errors_is_left_alone(site: Made) -> None:
    served, url, fetcher = site
    served.robots = (503, "")
    with pytest.raises(DeniedError, match="has errors"):
        await fetcher.page(url + "/text")
    assert served.asked == ["/robots.txt"]


async def test_robots_can_be_turned_off_by_the_operator(site: Made) -> None:
    served, url, _ = site
    served.robots = (200, "User-agent: *\nDisallow: /")
    options: dict[str, Any] = {"respect_robots": False}
    fetcher = Fetcher(Guard([url.removeprefix("http://")]), **options)
    await fetcher.page(url + "/text")
    assert served.asked == ["/text"]
    await fetcher.aclose()
