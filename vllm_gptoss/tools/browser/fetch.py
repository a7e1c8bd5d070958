"""Opening a URL for the model: guarded addresses, robots.txt, bounded redirects, bytes and time, then text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import httpx

from vllm_gptoss.tools.browser.guard import DeniedError, Guard, GuardedTransport, check_scheme, host_matches
from vllm_gptoss.tools.browser.markup import PageError, text_page, with_url
from vllm_gptoss.tools.browser.page import Page, neutral
from vllm_gptoss.tools.browser.reader import Reader
from vllm_gptoss.tools.browser.robots import Robots
from vllm_gptoss.version import __version__

logger = logging.getLogger(__name__)

AGENT = f"vllm-gptoss/{__version__}"
_ACCEPT = "text/html,application/xhtml+xml,text/plain,text/markdown,application/pdf;q=0.9,application/json;q=0.8"
_TEXT_TYPES = ("application/json", "application/xml", "application/yaml", "application/x-ndjson", "application/ld+json")
_ASCII = bytes(range(128))
_ENOUGH_TO_GUESS = 64
"""Bytes beyond ASCII from which an undeclared charset can be told."""

_ROBOTS_BYTES = 512_000  # RFC 9309, 2.5: parsers read at least 500 KiB


class FetchError(Exception):
    """The page could not be had; the message is what the model reads."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one fetch."""

    max_bytes: int = 5_000_000
    timeout_s: float = 20.0
    max_redirects: int = 5


def domain_allowed(url: str, allowed: Sequence[str]) -> bool:
    """Whether `url`'s host is one of `allowed` or below one; every host is when `allowed` is empty."""
    if not allowed:
        return True
    host = (urlsplit(url).hostname or "").lower()
    names = [name.lower().removeprefix("https://").removeprefix("http://").strip("/") for name in allowed]
    return any(host_matches(host, name) or host_matches(host, f"*.{name.removeprefix('*.')}") for name in names)


class Fetcher:
    """Fetches pages. `transport` replaces what sends the judged requests, for tests."""

    def __init__(
        self,
        guard: Guard | None = None,
        limits: Limits | None = None,
        *,
        agent: str = AGENT,
        respect_robots: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._transport = GuardedTransport(guard or Guard(), transport)
        self._headers = {"User-Agent": agent, "Accept": _ACCEPT}
        self._reader = Reader()
        self._robots = Robots(agent.split("/", 1)[0], self._robots_txt) if respect_robots else None

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._transport.aclose()

    def _client(self) -> httpx.AsyncClient:
        """A client for one page: its cookies last as long as its redirects, so that no conversation gets another's."""
        return httpx.AsyncClient(
            transport=self._transport,
            headers=self._headers,
            timeout=httpx.Timeout(self.limits.timeout_s),
            follow_redirects=False,
            trust_env=False,
        )

    async def page(self, url: str, allowed_domains: Sequence[str] = (), *, source: bool = False) -> Page:
        """The page at `url`, or its source text.

        Raises:
            DeniedError: the URL, or one it redirects to, must not be opened.
            FetchError: it cannot be had, or is nothing that can be read.
        """
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                final, response, body, cut = await self._follow(url, allowed_domains)
        except TimeoutError:
            raise FetchError(f"no complete answer within {self.limits.timeout_s:.0f} s") from None
        except httpx.HTTPError as error:
            raise FetchError(str(error) or type(error).__name__) from error
        try:
            page = await self._read(final, response, body, source=source)
        except PageError as error:
            raise FetchError(str(error)) from error
        if not cut:
            return page
        note = f"\n\n[page cut after {self.limits.max_bytes} bytes]"
        return Page(page.url, page.title, page.text + note, page.links, page.source_url)

    async def _follow(self, url: str, allowed: Sequence[str]) -> tuple[str, httpx.Response, bytes, bool]:
        client = self._client()  # not closed: it has nothing of its own but cookies
        for _ in range(self.limits.max_redirects + 1):
            check_scheme(url)
            if not domain_allowed(url, allowed):
                raise DeniedError(f"{urlsplit(url).hostname} is not one of the allowed domains: {', '.join(allowed)}")
            await self._ask_robots(url)
            response, body, cut = await self._get(client, url, self.limits.max_bytes)
            location = response.headers.get("location")
            if not (response.is_redirect and location):
                if response.status_code >= 400:
                    raise FetchError(f"the site answered {response.status_code} {response.reason_phrase}".rstrip())
                return url, response, body, cut
            url = _joined(url, location)
        raise FetchError(f"more than {self.limits.max_redirects} redirects")

    async def _get(self, client: httpx.AsyncClient, url: str, limit: int) -> tuple[httpx.Response, bytes, bool]:
        body = bytearray()
        async with client.stream("GET", url) as response:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > limit:
                    break
        return response, bytes(body[:limit]), len(body) > limit

    async def _ask_robots(self, url: str) -> None:
        if self._robots is None:
            return
        parts = urlsplit(url)
        if reason := await self._robots.refusal(f"{parts.scheme}://{parts.netloc}", url):
            raise DeniedError(f"{url} was not opened: {reason}")

    async def _robots_txt(self, url: str) -> tuple[int, str]:
        client = self._client()
        for _ in range(self.limits.max_redirects):
            response, body, _ = await self._get(client, url, _ROBOTS_BYTES)
            location = response.headers.get("location")
            if not (response.is_redirect and location):
                return response.status_code, body.decode("utf-8", "replace")
            url = _joined(url, location)
        return 404, ""

    async def _read(self, url: str, response: httpx.Response, body: bytes, *, source: bool) -> Page:
        kind = response.headers.get("content-type", "text/html").split(";")[0].strip().lower()
        if kind == "application/pdf" or body.startswith(b"%PDF-"):
            return _under_url(await self._reader.pdf(body, url))
        text = await asyncio.to_thread(_decode, response, body)
        if source:
            shown = f"view-source:{url}"
            return Page(shown, shown, neutral(text), source_url=url)
        if kind in ("text/html", "application/xhtml+xml"):
            return _under_url(await self._reader.html(text, url))
        if kind.startswith("text/") or kind in _TEXT_TYPES or kind.endswith(("+json", "+xml")):
            return await asyncio.to_thread(text_page, text, url)
        raise FetchError(f"its type, {kind}, cannot be shown as text")


def _under_url(page: Page) -> Page:
    return replace(page, text=with_url(page.url, page.text), _cache={})


def _joined(url: str, location: str) -> str:
    try:
        return str(httpx.URL(url).join(location))
    except httpx.InvalidURL as error:
        raise FetchError(f"the site redirects to something that is no URL: {error}") from error


def _decode(response: httpx.Response, body: bytes) -> str:
    """Text by the declared charset, else UTF-8, else Windows-1252 where there is little to tell by, or a guess."""
    from bs4.dammit import EncodingDetector, UnicodeDammit

    declared = response.charset_encoding or EncodingDetector.find_declared_encoding(body, is_html=True)
    little = not declared and len(body.translate(None, _ASCII)) < _ENOUGH_TO_GUESS
    read = UnicodeDammit(body, [declared or "utf-8"], user_encodings=["windows-1252"] if little else [])
    text = read.unicode_markup
    return text if text is not None else body.decode("utf-8", "replace")
